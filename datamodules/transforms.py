"""Normalisation and augmentation of whole batches, on the batch's device, with a random draw for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Augmentation(Protocol):
    """A random change of a batch of images.

    Implementations draw from ``generator`` only (a CPU generator, so that every device gets the same draws), once for
    each sample, and change neither the shape nor the dtype.
    """

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return changed images of the same shape and dtype; the given ones stay as they are."""
        ...


@dataclass(frozen=True)
class RandomCrop:
    """A random crop of the size of the image, out of the image padded with black on all four sides.

    The same distribution as torchvision's ``RandomCrop(size, padding)``, applied to a batch. To be applied before
    normalisation, as black is zero.

    Attributes:
        padding: Pixels added on each side, at least 0.
    """

    padding: int = 4

    def __post_init__(self) -> None:
        """Check the padding."""
        if self.padding < 0:
            raise ValueError(f"padding must be at least 0, got {self.padding}")

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Crop each image at its own place.

        Args:
            images: Shape (B, C, H, W), any dtype.
            generator: CPU generator; two numbers are drawn for each sample, all rows first, then all columns.

        Returns:
            New tensor of the same shape.
        """
        check_images(images)
        batch, _, height, width = images.shape
        shifts = torch.randint(0, 2 * self.padding + 1, (2, batch), generator=generator).to(images.device)
        padded = F.pad(images, (self.padding,) * 4)
        # All possible crops as a view without a copy; one indexing step then takes each sample's own.
        crops = padded.unfold(2, height, 1).unfold(3, width, 1)
        return crops[torch.arange(batch, device=images.device), :, shifts[0], shifts[1]]


@dataclass(frozen=True)
class RandomFlip:
    """A flip of left and right, for each image with its own draw.

    The same distribution as torchvision's ``RandomHorizontalFlip(p)``, applied to a batch.

    Attributes:
        p: Probability of a flip, between 0 and 1.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        """Check the probability."""
        if not 0.0 <= self.p <= 1.0:
            raise ValueError(f"p must be between 0 and 1, got {self.p}")

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Flip some of the images.

        Args:
            images: Shape (B, C, H, W), any dtype.
            generator: CPU generator; one number is drawn for each sample.

        Returns:
            New tensor of the same shape.
        """
        check_images(images)
        flipped = (torch.rand(len(images), generator=generator) < self.p).to(images.device)
        return torch.where(flipped[:, None, None, None], images.flip(-1), images)


@dataclass(frozen=True)
class BatchTransform:
    """What happens to a batch between the stored tensors and the client: augmentation, then normalisation.

    Attributes:
        mean: Mean of each channel, in the scale of float inputs (unsigned bytes are scaled to [0, 1] first); None for
            none.
        std: Standard deviation of each channel, above 0; None for none.
        augmentations: Applied in this order, on the stored values, before normalisation.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    augmentations: tuple[Augmentation, ...] = ()

    def __post_init__(self) -> None:
        """Check that mean and deviation belong together."""
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std must be given together, or neither")
        if self.mean is not None and self.std is not None:
            if len(self.mean) != len(self.std):
                raise ValueError(f"mean has {len(self.mean)} channels, std has {len(self.std)}")
            if min(self.std) <= 0:
                raise ValueError(f"std must be above 0 in every channel, got {self.std}")

    def augment(self, inputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Apply the augmentations.

        Args:
            inputs: Stored values, shape (B, C, H, W).
            generator: CPU generator of all random draws.

        Returns:
            Tensor of the same shape and dtype.
        """
        for augmentation in self.augmentations:
            inputs = augmentation(inputs, generator)
        return inputs

    def normalize(self, inputs: Tensor) -> Tensor:
        """Turn stored values into float inputs.

        Args:
            inputs: Stored values, shape (B, C, ...); unsigned bytes are divided by 255, as torchvision's ``ToTensor``
                does.

        Returns:
            New float tensor of the same shape; ``inputs`` itself if there is nothing to do. Whole numbers wider than
            a byte are token ids or the like and stay as they are.

        Raises:
            ValueError: If the number of channels is not that of the mean.
        """
        if inputs.dtype == torch.uint8:
            outputs = inputs.float().div_(255)
        else:
            outputs = inputs if self.mean is None else inputs.float().clone()
        if self.mean is None or self.std is None:
            return outputs
        if inputs.ndim < 2 or inputs.shape[1] != len(self.mean):
            raise ValueError(
                f"mean and std have {len(self.mean)} channels, the inputs have shape {tuple(inputs.shape)}"
            )
        shape = (1, -1, *([1] * (inputs.ndim - 2)))
        mean = torch.tensor(self.mean, dtype=outputs.dtype, device=inputs.device).view(shape)
        std = torch.tensor(self.std, dtype=outputs.dtype, device=inputs.device).view(shape)
        return outputs.sub_(mean).div_(std)


def check_images(images: Tensor) -> None:
    """Check that a batch has the shape of images.

    Raises:
        ValueError: If it has not.
    """
    if images.ndim != 4:
        raise ValueError(f"augmentations take images of shape (B, C, H, W), got {tuple(images.shape)}")


def channel_statistics(inputs: Tensor, chunk: int = 16384) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over a whole set of images.

    Args:
        inputs: Unsigned bytes of shape (N, C, ...).
        chunk: Samples that are looked at together, which bounds the memory needed.

    Returns:
        Mean and deviation of each channel in the scale [0, 1]; a deviation of 0 (a constant channel) becomes 1.
    """
    # Histograms of bytes are exact whatever the order of summation, and one pass gives both moments.
    histogram = torch.zeros(inputs.shape[1], 256, dtype=torch.int64)
    for part in inputs.split(chunk):
        for channel in range(inputs.shape[1]):
            histogram[channel] += torch.bincount(part[:, channel].reshape(-1), minlength=256)
    shares = histogram.double() / histogram.sum(dim=1, keepdim=True).clamp_min(1)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = shares @ values
    std = (shares * (values - mean[:, None]) ** 2).sum(dim=1).sqrt()
    std = torch.where(std > 0, std, torch.ones_like(std))
    return tuple(mean.tolist()), tuple(std.tolist())
