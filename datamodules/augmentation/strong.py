"""Strong augmentation of contrastive methods, on whole batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from pfl_lightning.datamodules.augmentation.base import Augmentation
from pfl_lightning.datamodules.augmentation.color import ColorJitter, RandomGrayscale
from pfl_lightning.datamodules.augmentation.geometry import RandomFlip, RandomResizedCrop
from pfl_lightning.datamodules.augmentation.ops import check_colors, resize_boxes, to_gray_, unit_floats


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

    def __post_init__(self) -> None:
        """Check the settings, each where it is used."""
        _ = self.parts

    @cached_property
    def parts(self) -> tuple[RandomResizedCrop, RandomFlip, ColorJitter, RandomGrayscale]:
        """Augmentations of the chain, in the order in which they are applied."""
        jitter = ColorJitter(self.brightness, self.contrast, self.saturation, self.hue, self.jitter)
        return RandomResizedCrop(self.scale), RandomFlip(self.flip), jitter, RandomGrayscale(self.grayscale)

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
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
        check_colors(images)
        boxes = crop.boxes(len(images), images.shape[2], images.shape[3], generator)
        flipped = flip.draw(len(images), generator)
        changes = jitter.draw(len(images), generator)
        gray = grayscale.draw(len(images), generator)
        # Sorted as the jitter needs them while they are still bytes: a copy of a quarter of the size.
        sorting = changes.sorting()
        views = unit_floats(images.index_select(0, sorting.to(images.device)))
        views = resize_boxes(views, boxes[:, sorting], flipped[sorting])
        jitter.apply_(views, changes.take(sorting))
        to_gray_(views, gray[sorting])
        return views.index_select(0, sorting.argsort().to(images.device))
