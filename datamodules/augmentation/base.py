"""Base class of augmentations, and checks of their inputs and settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from pfl_lightning.checks import check_between


class Augmentation(ABC):
    """Random transform of a batch of images.

    A subclass draws from ``generator`` only (a CPU generator, so that every device gets the same draws), independently
    for each sample, and keeps the shape. Transforms that only move values keep the dtype. Transforms that compute new
    values convert unsigned bytes to floats from 0 to 1, so that a chain of them never rounds in between.

    Attributes:
        unit_range: True if floats must be between 0 and 1, since changes of color need black and white.

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
        raise ValueError(f"augmentations take images of shape (B, C, H, W), got {tuple(images.shape)}")


def check_probability(p: float) -> None:
    """Check that a value is a probability.

    Raises:
        ValueError: If it is not.
    """
    check_between("p", p, 0, 1)


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
