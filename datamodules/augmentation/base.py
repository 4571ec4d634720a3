"""What an augmentation is, and what is checked of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor


class Augmentation(ABC):
    """A random change of a batch of images.

    Implementations draw from ``generator`` only (a CPU generator, so that every device gets the same draws), for each
    sample anew, and keep the shape. Those that only move values keep the dtype; those that compute new values turn
    unsigned bytes into floats from 0 to 1, so that a chain of them never rounds in between.

    Attributes:
        unit_range: Whether floats must lie between 0 and 1, as the changes of color need black and white.
    """

    unit_range: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Change a batch.

        Args:
            images: Shape (B, C, H, W), unsigned bytes or floats.
            generator: CPU generator of all random draws; None for torch's own.

        Returns:
            New images of the same shape; the given ones stay as they are.

        Raises:
            ValueError: If the images have another shape.
        """


def check_images(images: Tensor) -> None:
    """Check that a batch has the shape of images.

    Raises:
        ValueError: If it has not.
    """
    if images.ndim != 4:
        raise ValueError(f"augmentations take images of shape (B, C, H, W), got {tuple(images.shape)}")


def check_probability(p: float) -> None:
    """Check that a value is a probability.

    Raises:
        ValueError: If it is not.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must be between 0 and 1, got {p}")


def choose_augmentations(
    augment: bool | Sequence[Augmentation], usual: tuple[Augmentation, ...]
) -> tuple[Augmentation, ...]:
    """What a data module's ``augment`` means.

    Args:
        augment: False for none, True for the usual ones, or the ones to apply, in this order.
        usual: The data set's usual augmentations.

    Raises:
        TypeError: If something else is given, such as torchvision's transforms: they draw once for a whole batch, and
            not from the client's generator.
    """
    if isinstance(augment, bool):
        return usual if augment else ()
    if not isinstance(augment, Sequence) or not all(isinstance(one, Augmentation) for one in augment):
        raise TypeError(
            f"augment must be True, False or a list of Augmentation, got {augment!r}: take those of "
            "pfl_lightning.datamodules ([RandomFlip()], [StrongAugmentation()], ...), or derive one from Augmentation"
        )
    return tuple(augment)


def check_augmentable(inputs: Tensor, augmentations: Sequence[Augmentation]) -> None:
    """Check that stored inputs are such as augmentations take.

    Args:
        inputs: Shape (N, ...).
        augmentations: What is to be applied to batches of them.

    Raises:
        ValueError: If the inputs are not images, or floats outside [0, 1] where colors are changed.
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
                f"{names[0]} needs bytes or floats from 0 (black) to 1 (white), the inputs reach from {low:g} to "
                f"{high:g}: take the normalization out of the data set and give this module mean and std"
            )
