"""Augmentations of colors, and the strong ones that contrastive methods take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from pfl_lightning.checks import check_between, check_number
from pfl_lightning.data import to_device
from pfl_lightning.datamodules.augmentation import ops
from pfl_lightning.datamodules.augmentation.geometry import RandomFlip, RandomResizedCrop
from pfl_lightning.datamodules.augmentation.ops import Augmentation, Generators, drawn

HUE = 3  # the number of the last change, after brightness, contrast and saturation


@dataclass(frozen=True)
class Jitter:
    """Drawn changes of color of each image of a batch, on the CPU.

    Attributes:
        amounts: Factors of brightness, contrast and saturation, and shifts of hue, shape (4, B).
        order: Order of the four changes, numbered as above, shape (4, B), int64.
        tones_before: Number of changes before the hue, or -1 for an image that is not changed, shape (B,), int64.
    """

    amounts: Tensor
    order: Tensor
    tones_before: Tensor

    def sorting(self) -> Tensor:
        """Order of the images in which they are changed, shape (B,).

        All changes of hue are one step. In this order, the images that have a first, second or third change of tone
        before the hue, or after it, are neighbors; images that are not changed come last.
        """
        return self.tones_before.argsort(descending=True, stable=True)

    def weights(self) -> Tensor:
        """Weights for ``blend_`` at each place in the order of changes, shape (3, 4, B); not used for the hue."""
        own = self.amounts.gather(0, self.order)
        return torch.stack([own, torch.where(self.order == 1, 1 - own, 0), torch.where(self.order == 2, 1 - own, 0)])

    def take(self, indices: Tensor) -> Jitter:
        """Changes of the images with the given indices."""
        return Jitter(self.amounts[:, indices], self.order[:, indices], self.tones_before[indices])


@dataclass(frozen=True)
class ColorJitter(Augmentation):
    """Random brightness, contrast, saturation and hue, in a random order, drawn independently for each image.

    The distribution is that of torchvision's ``RandomApply([ColorJitter(brightness, contrast, saturation, hue)], p)``
    for single images: every image has its own order of the four changes. Apply it before normalization, as black is 0
    and white is 1. Images of one channel have neither saturation nor hue.

    Attributes:
        brightness: Factors are drawn between 1 - brightness (at least 0) and 1 + brightness; at least 0.
        contrast: As brightness.
        saturation: As brightness.
        hue: Greatest shift in either direction, in turns of the circle of hues, from 0 to 0.5.
        p: Probability that an image is changed at all, between 0 and 1.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        >>> import torch
        >>> from pfl_lightning.datamodules import ColorJitter
        >>> images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
        >>> jittered = ColorJitter(brightness=0.4, hue=0.1)(images, torch.Generator().manual_seed(0))
        >>> jittered.shape, jittered.dtype  # bytes become floats from 0 to 1
        (torch.Size([4, 3, 8, 8]), torch.float32)
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    p: float = 1.0

    unit_range: ClassVar[bool] = True
    takes_parts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the settings."""
        for name in ("brightness", "contrast", "saturation"):
            check_number(name, getattr(self, name))
        check_between("hue", self.hue, 0, 0.5)  # half a turn
        check_between("p", self.p, 0, 1)

    def __call__(self, images: Tensor, generator: Generators = None) -> Tensor:
        """Change the colors of each image.

        Args:
            images: Shape (B, C, H, W) with 1 or 3 channels, unsigned bytes or floats from 0 to 1.
            generator: CPU generator; nine numbers are drawn for each sample, for all samples together: one decides
                whether it is changed, four are the amounts, and four give the order.

        Returns:
            New float tensor of the same shape; bytes are scaled to [0, 1].

        Raises:
            ValueError: If the images have another number of channels.
        """
        ops.check_colors(images)
        jitter = self.draw(len(images), generator)
        sorting = jitter.sorting()
        places = to_device(torch.stack([sorting, sorting.argsort()]), images.device)
        changed = ops.unit_floats(images.index_select(0, places[0]))
        self.apply_(changed, jitter.take(sorting))
        return changed.index_select(0, places[1])

    def draw(self, batch: int, generator: Generators = None) -> Jitter:
        """Draw the changes of color of each image.

        Args:
            batch: Number of images B.
            generator: CPU generator; nine numbers are drawn for each image.
        """
        like = torch.float32  # whatever the default type is
        draws = drawn(lambda count, own: torch.rand(9, count, generator=own, dtype=like), batch, generator)
        order = draws[5:].argsort(dim=0)
        tones_before = (order == HUE).int().argmax(dim=0)
        tones_before[draws[0] >= self.p] = -1
        strengths = draws.new_tensor([self.brightness, self.contrast, self.saturation, self.hue])[:, None]
        lowest = torch.cat([(1 - strengths[:HUE]).clamp_min(0), -strengths[HUE:]])
        highest = torch.cat([1 + strengths[:HUE], strengths[HUE:]])
        return Jitter(lowest + draws[1:5] * (highest - lowest), order, tones_before)

    def apply_(self, images: Tensor, jitter: Jitter) -> None:
        """Change images in place.

        Args:
            images: Floats from 0 to 1, shape (B, C, H, W) with 1 or 3 channels, in the order of ``sorting``; changed.
            jitter: Their changes, in the same order.
        """
        weights = to_device(jitter.weights().to(images.dtype), images.device)
        # Numbers of images that are changed and have at least 0, 1, 2, 3 changes of tone before the hue.
        at_least = [int((jitter.tones_before >= place).sum()) for place in range(HUE + 1)]
        for place in range(HUE):
            self._tone(images, weights[:, place], 0, at_least[place + 1])
        if self.hue > 0 and images.shape[1] == 3:
            ops.shift_hue_(images[: at_least[0]], jitter.amounts[HUE, : at_least[0]])
        for place in range(1, HUE + 1):
            self._tone(images, weights[:, place], at_least[place], at_least[0])

    def _tone(self, images: Tensor, weights: Tensor, start: int, stop: int) -> None:
        """Apply the change of tone at one place of the order, to the images that have one there."""
        if start < stop and (self.brightness, self.contrast, self.saturation) != (0, 0, 0):
            ops.blend_(images[start:stop], *weights[:, start:stop])


@dataclass(frozen=True)
class RandomGrayscale(Augmentation):
    """Random conversion to gray, drawn independently for each image.

    The distribution is that of torchvision's ``RandomGrayscale(p)`` for single images. Images of one channel are
    unchanged.

    Attributes:
        p: Probability of gray, between 0 and 1.

    Raises:
        ValueError: If ``p`` is not a probability.

    Example:
        >>> import torch
        >>> from pfl_lightning.datamodules import RandomGrayscale
        >>> gray = RandomGrayscale(p=1.0)(torch.rand(4, 3, 8, 8))
        >>> gray.shape, torch.equal(gray[:, 0], gray[:, 2])
        (torch.Size([4, 3, 8, 8]), True)
    """

    p: float = 0.1

    takes_parts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the probability."""
        check_between("p", self.p, 0, 1)

    def __call__(self, images: Tensor, generator: Generators = None) -> Tensor:
        """Make some of the images gray; they keep their number of channels.

        Args:
            images: Shape (B, C, H, W) with 1 or 3 channels, unsigned bytes or floats.
            generator: CPU generator; one number is drawn for each sample.

        Returns:
            New float tensor of the same shape; bytes are scaled to [0, 1].

        Raises:
            ValueError: If the images have another number of channels.
        """
        ops.check_colors(images)
        floats = ops.unit_floats(images)
        chosen = self.draw(len(images), generator)
        return ops.to_gray_(floats.clone() if floats is images else floats, chosen)

    def draw(self, batch: int, generator: Generators = None) -> Tensor:
        """Draw the images that become gray: shape (B,), bool, on the CPU; one number per image."""
        return drawn(lambda count, own: torch.rand(count, generator=own), batch, generator) < self.p


@dataclass(frozen=True)
class StrongAugmentation(Augmentation):
    """Random resized crop, flip, color jitter and grayscale: the views of contrastive methods.

    Draws and images (up to rounding) are those of the chain of :class:`RandomResizedCrop`, :class:`RandomFlip`,
    :class:`ColorJitter` and :class:`RandomGrayscale`, with crop and flip in one step.

    Source: T. Chen, S. Kornblith, M. Norouzi and G. Hinton, A Simple Framework for Contrastive Learning of Visual
    Representations, ICML 2020: no blur and colors of half the strength, as there for CIFAR-10. The least area of a
    crop is that of X. Chen, H. Fan, R. Girshick and K. He, Improved Baselines with Momentum Contrastive Learning, 2020.

    Attributes:
        scale: Least and greatest share of the image's area in the crop.
        flip: Probability of a flip of left and right.
        brightness: Strength of the jitter of brightness, see :class:`ColorJitter`.
        contrast: Strength of the jitter of contrast.
        saturation: Strength of the jitter of saturation.
        hue: Strength of the jitter of hue.
        jitter: Probability that the colors are changed.
        grayscale: Probability of gray.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        >>> import torch
        >>> from pfl_lightning.datamodules import StrongAugmentation
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> views = StrongAugmentation()(images, torch.Generator().manual_seed(0))
        >>> views.shape, views.dtype
        (torch.Size([4, 3, 32, 32]), torch.float32)
    """

    scale: tuple[float, float] = (0.2, 1.0)
    flip: float = 0.5
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    jitter: float = 0.8
    grayscale: float = 0.2

    unit_range: ClassVar[bool] = True
    takes_parts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the settings, each where it is used."""
        _ = self.parts

    @cached_property
    def parts(self) -> tuple[RandomResizedCrop, RandomFlip, ColorJitter, RandomGrayscale]:
        """Augmentations of the chain, in the order in which they are applied."""
        jitter = ColorJitter(self.brightness, self.contrast, self.saturation, self.hue, self.jitter)
        return RandomResizedCrop(self.scale), RandomFlip(self.flip), jitter, RandomGrayscale(self.grayscale)

    def __call__(self, images: Tensor, generator: Generators = None) -> Tensor:
        """Make one view of each image.

        Args:
            images: Shape (B, C, H, W) with 1 or 3 channels, unsigned bytes or floats from 0 to 1.
            generator: CPU generator; draws for the crops of all samples, then the flips, the colors, the grayscale.

        Returns:
            New float tensor of the same shape; bytes are scaled to [0, 1].

        Raises:
            ValueError: If the images have another number of channels.
        """
        crop, flip, jitter, grayscale = self.parts
        ops.check_colors(images)
        boxes = crop.boxes(len(images), images.shape[2], images.shape[3], generator)
        flipped = flip.draw(len(images), generator)
        changes = jitter.draw(len(images), generator)
        gray = grayscale.draw(len(images), generator)
        # Sorted as the jitter needs them while they are still bytes: a copy of a quarter of the size.
        sorting = changes.sorting()
        places = to_device(torch.stack([sorting, sorting.argsort()]), images.device)
        views = ops.unit_floats(images.index_select(0, places[0]))
        views = ops.resize_boxes(views, boxes[:, sorting], flipped[sorting])
        jitter.apply_(views, changes.take(sorting))
        ops.to_gray_(views, gray[sorting])
        return views.index_select(0, places[1])
