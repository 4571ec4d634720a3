"""Random crops, flips and rotations of whole batches, on the batch's device, with independent draws per sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_lightning.checks import check_at_least, check_between, check_choice
from pfl_lightning.data import to_device
from pfl_lightning.datamodules.augmentation.ops import (
    Augmentation,
    Generators,
    check_images,
    drawn,
    resize_boxes,
    rotate,
    unit_floats,
)

ATTEMPTS = 10  # as in torchvision: after this many boxes that do not fit, the center of the image is taken


@dataclass(frozen=True)
class RandomCrop(Augmentation):
    """Random crop of the image's size, out of the image padded with black on all four sides.

    The distribution is that of torchvision's ``RandomCrop(size, padding)`` for single images. Apply it before
    normalization, as black is zero.

    Attributes:
        padding: Pixels added on each side, at least 0.

    Raises:
        ValueError: If the padding is not a whole number of at least 0.

    Example:
        >>> import torch
        >>> from pfl_lightning.datamodules import RandomCrop
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> cropped = RandomCrop(padding=4)(images, torch.Generator().manual_seed(0))
        >>> cropped.shape, cropped.dtype
        (torch.Size([4, 3, 32, 32]), torch.uint8)
    """

    padding: int = 4

    takes_parts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the padding."""
        check_at_least("padding", self.padding, 0)

    def __call__(self, images: Tensor, generator: Generators = None) -> Tensor:
        """Crop each image at a random position.

        Args:
            images: Shape (B, C, H, W), any dtype.
            generator: CPU generator; two numbers are drawn for each sample, all rows first, then all columns.

        Returns:
            New tensor of the same shape.
        """
        check_images(images)
        batch, _, height, width = images.shape
        places = 2 * self.padding + 1
        shifts = drawn(lambda count, own: torch.randint(0, places, (2, count), generator=own), batch, generator)
        shifts = to_device(shifts, images.device)
        padded = F.pad(images, (self.padding,) * 4)
        # All possible crops as a view without a copy; one indexing step then takes each sample's own.
        crops = padded.unfold(2, height, 1).unfold(3, width, 1)
        return crops[torch.arange(batch, device=images.device), :, shifts[0], shifts[1]]


@dataclass(frozen=True)
class RandomFlip(Augmentation):
    """Random flip of left and right, drawn independently for each image.

    The distribution is that of torchvision's ``RandomHorizontalFlip(p)`` for single images.

    Attributes:
        p: Probability of a flip, between 0 and 1.

    Raises:
        ValueError: If ``p`` is not a probability.

    Example:
        >>> import torch
        >>> from pfl_lightning.datamodules import RandomFlip
        >>> RandomFlip(p=1.0)(torch.tensor([[[[1, 2, 3]]]])).tolist()
        [[[[3, 2, 1]]]]
    """

    p: float = 0.5

    takes_parts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the probability."""
        check_between("p", self.p, 0, 1)

    def __call__(self, images: Tensor, generator: Generators = None) -> Tensor:
        """Flip some of the images.

        Args:
            images: Shape (B, C, H, W), any dtype.
            generator: CPU generator; one number is drawn for each sample.

        Returns:
            New tensor of the same shape.
        """
        check_images(images)
        flipped = to_device(self.draw(len(images), generator), images.device)
        return torch.where(flipped[:, None, None, None], images.flip(-1), images)

    def draw(self, batch: int, generator: Generators = None) -> Tensor:
        """Draw the images that are flipped: shape (B,), bool, on the CPU; one number per image."""
        return drawn(lambda count, own: torch.rand(count, generator=own), batch, generator) < self.p


@dataclass(frozen=True)
class RandomResizedCrop(Augmentation):
    """Crop of a box of random area, aspect ratio and position, scaled to the size of the image (bilinear).

    The distribution is that of torchvision's ``RandomResizedCrop(size, scale, ratio)`` for single images, with their
    own size.

    Attributes:
        scale: Least and greatest share of the image's area, above 0 and at most 1.
        ratio: Least and greatest aspect ratio, width / height, above 0.

    Raises:
        ValueError: If a range is empty or out of bounds.

    Example:
        >>> import torch
        >>> from pfl_lightning.datamodules import RandomResizedCrop
        >>> crop = RandomResizedCrop(scale=(0.2, 1.0))
        >>> crop(torch.rand(4, 3, 32, 32)).shape
        torch.Size([4, 3, 32, 32])
        >>> top, left, height, width = crop.boxes(batch=100, height=32, width=32)
        >>> bool((top + height <= 32).all()), bool((height * width >= 0.15 * 32 * 32).all())
        (True, True)
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    takes_parts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale must be two increasing shares of area, above 0 and at most 1, got {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise ValueError(f"ratio must be two increasing finite values of width / height above 0, got {self.ratio}")

    def __call__(self, images: Tensor, generator: Generators = None) -> Tensor:
        """Crop each image by a random box and scale it to the original size.

        Args:
            images: Shape (B, C, H, W), unsigned bytes or floats.
            generator: CPU generator; 22 numbers are drawn for each sample, see :meth:`boxes`.

        Returns:
            New float tensor of the same shape; bytes are scaled to [0, 1].
        """
        images = unit_floats(images)
        return resize_boxes(images, self.boxes(len(images), images.shape[2], images.shape[3], generator))

    def boxes(self, batch: int, height: int, width: int, generator: Generators = None) -> Tensor:
        """Draw random boxes.

        Args:
            batch: Number of boxes B.
            height: Height of the image in pixels.
            width: Width of the image in pixels.
            generator: CPU generator. For all boxes together: ten areas, then ten aspect ratios, of which the first
                pair that fits is taken, then the row and the column.

        Returns:
            Top, left, height and width in pixels, shape (4, B), int64, on the CPU.
        """
        shape, like = 2 * ATTEMPTS + 2, torch.float64
        draws = drawn(lambda count, own: torch.rand(shape, count, generator=own, dtype=like), batch, generator)
        low, high = (math.log(bound) for bound in self.ratio)
        areas = (self.scale[0] + draws[:ATTEMPTS] * (self.scale[1] - self.scale[0])) * (height * width)
        shapes = torch.exp(low + draws[ATTEMPTS:-2] * (high - low))
        wide, tall = (areas * shapes).sqrt_().round_(), (areas / shapes).sqrt_().round_()
        fits = (wide > 0) & (wide <= width) & (tall > 0) & (tall <= height)
        first = fits.int().argmax(dim=0, keepdim=True)
        wide, tall, fits = (each.gather(0, first)[0] for each in (wide, tall, fits))
        middle_tall, middle_wide = self._middle(height, width)
        wide, tall = torch.where(fits, wide, middle_wide), torch.where(fits, tall, middle_tall)
        # float64 draws times so few pixels cannot round up to the next one.
        top = torch.where(fits, (draws[-2] * (height - tall + 1)).floor_(), (height - tall).div(2).floor_())
        left = torch.where(fits, (draws[-1] * (width - wide + 1)).floor_(), (width - wide).div(2).floor_())
        return torch.stack([top, left, tall, wide]).long()

    def _middle(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the greatest centered box with an allowed aspect ratio."""
        shape = width / height
        if shape < self.ratio[0]:
            return round(width / self.ratio[0]), width
        if shape > self.ratio[1]:
            return height, round(height * self.ratio[1])
        return height, width


@dataclass(frozen=True)
class RandomRotation(Augmentation):
    """Rotation about the center by a random angle; pixels from outside the image are black.

    The distribution is that of torchvision's ``RandomRotation(degrees, interpolation)`` for single images. Apply it
    before normalization, as black is zero.

    Attributes:
        degrees: Greatest angle in either direction, at least 0.
        interpolation: ``nearest`` (torchvision's default) or ``bilinear``.

    Raises:
        ValueError: If the angle is negative or not finite, or the interpolation is unknown.

    Example:
        >>> import torch
        >>> from pfl_lightning.datamodules import RandomRotation
        >>> rotated = RandomRotation(15, interpolation="bilinear")(torch.rand(4, 1, 28, 28))
        >>> rotated.shape
        torch.Size([4, 1, 28, 28])
    """

    degrees: float
    interpolation: Literal["nearest", "bilinear"] = "nearest"

    takes_parts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the settings."""
        check_between("degrees", self.degrees, 0, 360)
        check_choice("interpolation", self.interpolation, ("nearest", "bilinear"))

    def __call__(self, images: Tensor, generator: Generators = None) -> Tensor:
        """Rotate each image by a random angle.

        Args:
            images: Shape (B, C, H, W), unsigned bytes or floats.
            generator: CPU generator; one number is drawn for each sample.

        Returns:
            New float tensor of the same shape; bytes are scaled to [0, 1].
        """
        images = unit_floats(images)
        like = torch.float64
        draws = drawn(lambda count, own: torch.rand(count, generator=own, dtype=like), len(images), generator)
        return rotate(images, (2 * draws - 1) * self.degrees, self.interpolation)
