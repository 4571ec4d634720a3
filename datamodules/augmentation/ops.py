"""Augmentations of a batch: their base, compositions and the operations on pixels that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_lightning.data import to_device

Generators: TypeAlias = torch.Generator | tuple[tuple[torch.Generator, int], ...] | None
"""CPU generator of a batch, or those of its parts, one after the other, each with its number of images."""

LUMA = (0.2989, 0.587, 0.114)  # ITU-R BT.601, as torchvision rounds it


def drawn(draw: Callable[[int, torch.Generator | None], Tensor], batch: int, generator: Generators) -> Tensor:
    """Numbers of the images of a batch, shape (..., B): each part's are what its own generator gives it alone.

    Args:
        draw: Draws for a number of images by a generator.
        batch: Number of images B, those of all parts.
        generator: Generator of the batch, or of each part.

    Example:
        >>> first, second = (torch.Generator().manual_seed(seed) for seed in (0, 1))
        >>> both = drawn(lambda count, own: torch.rand(2, count, generator=own), 5, ((first, 3), (second, 2)))
        >>> torch.equal(both[:, 3:], torch.rand(2, 2, generator=torch.Generator().manual_seed(1)))
        True
    """
    if isinstance(generator, tuple):
        return torch.cat([draw(count, own) for own, count in generator], dim=-1)
    return draw(batch, generator)


def unit_floats(images: Tensor) -> Tensor:
    """Images as floats from 0 to 1.

    Args:
        images: Shape (B, C, H, W), unsigned bytes or floats.

    Returns:
        Bytes divided by 255, as a new tensor; floats unchanged.

    Raises:
        ValueError: If the images have another shape or dtype.

    Example:
        >>> unit_floats(torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8))
        tensor([[[[0.0000, 0.2000, 1.0000]]]])
    """
    check_images(images)
    if images.dtype == torch.uint8:
        return images.float().div_(255)
    if not images.is_floating_point():
        raise ValueError(f"this augmentation needs images of unsigned bytes or floats, got {images.dtype}")
    return images


def check_colors(images: Tensor) -> None:
    """Check that a batch has images of one channel (gray) or three (red, green, blue).

    Raises:
        ValueError: If it does not.
    """
    check_images(images)
    if images.shape[1] not in (1, 3):
        raise ValueError(f"changes of color need images with 1 or 3 channels, got shape {tuple(images.shape)}")


def luma(images: Tensor) -> Tensor:
    """Gray values of images (ITU-R BT.601).

    Args:
        images: Floats, shape (B, C, H, W) with 1 or 3 channels.

    Returns:
        New tensor, shape (B, 1, H, W).
    """
    if images.shape[1] == 1:
        return images.clone()
    red, green, blue = images.split(1, dim=1)
    # Channel by channel: a matrix product would be cut to lower precision where TF32 or autocast are on.
    gray: Tensor = red.mul(LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])
    return gray


def blend_(images: Tensor, own: Tensor, mean_gray: Tensor, gray: Tensor) -> Tensor:
    """Blend each image with its mean gray and its gray values, in place.

    With the factor f, the weights (f, 0, 0) change the brightness, (f, 1 - f, 0) the contrast, and (f, 0, 1 - f) the
    saturation. One pass serves a batch in which every image has a different change.

    Args:
        images: Floats from 0 to 1, shape (B, C, H, W) with 1 or 3 channels; changed.
        own: Weight of the image, shape (B,), on the images' device like the other two.
        mean_gray: Weight of the mean of its gray values, shape (B,).
        gray: Weight of its gray values, shape (B,).

    Returns:
        The given images, clamped to [0, 1].

    Example:
        Half the brightness of an image:

        >>> half, zero = torch.tensor([0.5]), torch.tensor([0.0])
        >>> blend_(torch.ones(1, 3, 1, 1), half, zero, zero).flatten().tolist()
        [0.5, 0.5, 0.5]
    """
    other = luma(images)
    mean = other.mean(dim=(2, 3), keepdim=True).mul_(mean_gray.view(-1, 1, 1, 1))
    other.mul_(gray.view(-1, 1, 1, 1)).add_(mean)
    return images.mul_(own.view(-1, 1, 1, 1)).add_(other).clamp_(0, 1)


def shift_hue_(images: Tensor, shifts: Tensor) -> Tensor:
    """Shift the hue of each image, in place.

    Value and saturation of a pixel are unchanged, and so are its greatest and least channel. Only the position of the
    channels between them is recomputed, from the hue on a circle of length six.

    Args:
        images: Floats from 0 to 1, shape (B, 3, H, W); changed.
        shifts: Shifts in turns of the circle of hues, from -0.5 to 0.5, shape (B,).

    Returns:
        The given images.

    Example:
        A third of a turn moves red to green:

        >>> red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
        >>> shift_hue_(red, torch.tensor([1 / 3])).flatten().round(decimals=3).abs().tolist()
        [0.0, 1.0, 0.0]
    """
    red, green, blue = images.split(1, dim=1)
    high, low = torch.maximum(red, green), torch.minimum(red, green)
    torch.maximum(high, blue, out=high)
    torch.minimum(low, blue, out=low)
    chroma = high - low
    # Red is at 0, green at 2, blue at 4 of 6. Gray pixels have no hue; any value will do, as their chroma is 0.
    from_green = (blue - red).add_(chroma, alpha=2)
    from_blue = (red - green).add_(chroma, alpha=4)
    # Choices by a weight of 0 or 1: on a CPU, torch.where over a mask without a pattern takes ten times as long.
    weight = (high - green).sign_()
    from_green.lerp_(from_blue, weight)
    hue = torch.sub(green, blue, out=from_blue).lerp_(from_green, high.sub_(red).sign_())
    hue.div_(torch.clamp_min(chroma, torch.finfo(images.dtype).tiny, out=weight).mul_(6))
    # One more turn than asked for keeps the sum positive, so that its fraction is the remainder.
    hue.add_(to_device((1 + shifts).view(-1, 1, 1, 1).to(images.dtype), images.device)).frac_().mul_(6)
    torch.addcmul(low, chroma, torch.sub(hue, 3, out=weight).abs_().sub_(1).clamp_(0, 1), out=red)
    torch.addcmul(low, chroma, torch.sub(hue, 2, out=weight).abs_().neg_().add_(2).clamp_(0, 1), out=green)
    torch.addcmul(low, chroma, torch.sub(hue, 4, out=weight).abs_().neg_().add_(2).clamp_(0, 1), out=blue)
    return images


def to_gray_(images: Tensor, chosen: Tensor) -> Tensor:
    """Make some images gray, in place; they keep their number of channels.

    Args:
        images: Floats, shape (B, C, H, W) with 1 or 3 channels; changed.
        chosen: True for the images to change, shape (B,), bool, on the CPU, so that their number is known without
            waiting for a device.

    Returns:
        The given images.
    """
    places = to_device(chosen.nonzero()[:, 0], images.device)
    return images.index_copy_(0, places, luma(images.index_select(0, places)).expand(-1, images.shape[1], -1, -1))


def resize_boxes(images: Tensor, boxes: Tensor, flipped: Tensor | None = None) -> Tensor:
    """Crop a box out of each image, scale it to the size of the image (bilinear), and flip some images.

    Boxes are no larger than the image, so nothing is scaled down, and torchvision's antialiasing would change nothing.

    Args:
        images: Floats, shape (B, C, H, W).
        boxes: Top, left, height and width in pixels, shape (4, B).
        flipped: True for the images whose left and right are exchanged, shape (B,), bool; None for no image.

    Returns:
        New tensor of the same shape.

    Example:
        The left half of a row of four pixels, flipped:

        >>> images, box = torch.tensor([[[[0.0, 1.0, 2.0, 3.0]]]]), torch.tensor([[0], [0], [1], [2]])
        >>> resize_boxes(images, box, flipped=torch.tensor([True])).flatten().tolist()
        [1.0, 0.75, 0.25, 0.0]
    """
    height, width = images.shape[2:]
    top, left, tall, wide = boxes.double()
    rows = _box_coordinates(top, tall, height)
    columns = _box_coordinates(left, wide, width)
    if flipped is not None:
        columns = torch.where(flipped[:, None], columns.flip(1), columns)
    shape = (len(images), height, width)
    places = to_device(torch.cat([columns, rows], dim=1).to(images.dtype), images.device)
    columns, rows = places.split([width, height], dim=1)
    grid = torch.stack([columns[:, None, :].expand(shape), rows[:, :, None].expand(shape)], dim=-1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def rotate(images: Tensor, degrees: Tensor, interpolation: Literal["nearest", "bilinear"] = "nearest") -> Tensor:
    """Rotate each image about its center, counter-clockwise; pixels from outside the image are black.

    Args:
        images: Floats, shape (B, C, H, W).
        degrees: Angle of each image, shape (B,).
        interpolation: ``nearest`` or ``bilinear``.

    Returns:
        New tensor of the same shape.

    Example:
        >>> rotate(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), torch.tensor([90.0])).tolist()
        [[[[2.0, 4.0], [1.0, 3.0]]]]
    """
    height, width = images.shape[2:]
    angles = degrees.double().deg2rad().view(-1, 1, 1)
    sine, cosine = to_device(torch.stack([angles.sin(), angles.cos()]).to(images.dtype), images.device)
    y = torch.arange(height, dtype=images.dtype, device=images.device).sub_((height - 1) / 2)[:, None]
    x = torch.arange(width, dtype=images.dtype, device=images.device).sub_((width - 1) / 2)
    grid = torch.stack([(cosine * x - sine * y) * (2 / width), (sine * x + cosine * y) * (2 / height)], dim=-1)
    return F.grid_sample(images, grid, mode=interpolation, padding_mode="zeros", align_corners=False)


def _box_coordinates(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Source coordinate of each pixel of a scaled box, in grid_sample's scale from -1 to 1, shape (B, size)."""
    steps = torch.arange(size, dtype=start.dtype) + 0.5
    inside = (steps * (length / size)[:, None] - 0.5).clamp_(min=0)
    # Pixels outside the box must not be mixed in: its border pixels are repeated.
    return (torch.minimum(inside, length[:, None] - 1) + start[:, None] + 0.5) * (2 / size) - 1


class Augmentation(ABC):
    """Random transform of a batch of images.

    A subclass draws from ``generator`` only (a CPU generator, so that every device gets the same draws), independently
    for each sample, and keeps the shape. Transforms that only move values keep the dtype. Transforms that compute new
    values convert unsigned bytes to floats from 0 to 1, so that a chain of them never rounds in between.

    Attributes:
        unit_range: True if floats must be between 0 and 1, since changes of color need black and white.
        takes_parts: True if the class takes the generators of several clients' images at once, as it draws by
            ``drawn`` alone; others, and subclasses that do not say it again, are called client by client.

    Example:
        A user-defined augmentation that inverts half of the images:

        >>> import torch
        >>> from pfl_lightning.datamodules import Augmentation
        >>> class RandomInvert(Augmentation):
        ...     unit_range = True
        ...     def __call__(self, images, generator=None):
        ...         inverted = torch.rand(len(images), generator=generator) < 0.5
        ...         return torch.where(inverted[:, None, None, None].to(images.device), 1 - images, images)
        >>> RandomInvert()(torch.rand(4, 3, 8, 8)).shape
        torch.Size([4, 3, 8, 8])
    """

    unit_range: ClassVar[bool] = False
    takes_parts: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Augment a batch.

        Args:
            images: Shape (B, C, H, W), unsigned bytes or floats.
            generator: CPU generator of all random draws; None for torch's global one.

        Returns:
            New images of the same shape; the given ones are unchanged.

        Raises:
            ValueError: If the images have another shape.
        """


def check_images(images: Tensor) -> None:
    """Check that a batch has the shape of images.

    Raises:
        ValueError: If the shape is not (B, C, H, W).
    """
    if images.ndim != 4:
        raise ValueError(f"augmentations need images of shape (B, C, H, W), got {tuple(images.shape)}")


def choose_augmentations(
    augment: bool | Sequence[Augmentation], usual: tuple[Augmentation, ...]
) -> tuple[Augmentation, ...]:
    """Augmentations that a data module's ``augment`` stands for.

    Args:
        augment: False for none, True for the usual ones, or the ones to apply, in this order.
        usual: The data set's usual augmentations.

    Returns:
        The augmentations to apply, in this order.

    Raises:
        TypeError: If something else is given, such as torchvision's transforms: they draw once for a whole batch, and
            not from the client's generator.

    Example:
        >>> from pfl_lightning.datamodules import RandomCrop, RandomFlip
        >>> choose_augmentations(True, usual=(RandomCrop(4), RandomFlip()))
        (RandomCrop(padding=4), RandomFlip(p=0.5))
        >>> choose_augmentations([RandomFlip()], usual=(RandomCrop(4), RandomFlip()))
        (RandomFlip(p=0.5),)
    """
    if isinstance(augment, bool):
        return usual if augment else ()
    if not isinstance(augment, Sequence) or not all(isinstance(one, Augmentation) for one in augment):
        raise TypeError(
            f"augment must be True, False or a list of Augmentation, got {augment!r}: use those of "
            "pfl_lightning.datamodules ([RandomFlip()], [StrongAugmentation()], ...), or subclass Augmentation"
        )
    return tuple(augment)


def check_augmentable(inputs: Tensor, augmentations: Sequence[Augmentation]) -> None:
    """Check that augmentations can be applied to stored inputs.

    Args:
        inputs: Stored inputs, shape (N, ...).
        augmentations: The augmentations of their batches.

    Raises:
        ValueError: If the inputs are no images, or floats outside [0, 1] with an augmentation of colors.
    """
    if not augmentations:
        return
    if inputs.ndim != 4:
        raise ValueError(f"augment needs images of shape (C, H, W), the inputs have {tuple(inputs.shape[1:])}")
    names = [type(one).__name__ for one in augmentations if one.unit_range]
    if names and inputs.is_floating_point() and len(inputs):
        low, high = (float(bound) for bound in inputs.aminmax())
        if low < 0 or high > 1:
            raise ValueError(
                f"{names[0]} needs bytes or floats from 0 (black) to 1 (white), the inputs range from {low:g} to "
                f"{high:g}: remove the normalization from the data set and give this module mean and std"
            )
