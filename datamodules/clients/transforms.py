"""From stored tensors to a client's batches: augmentation and normalization, of whole batches on their device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_lightning.datamodules.augmentation.base import Augmentation
from pfl_lightning.datamodules.augmentation.geometry import RandomCrop, RandomFlip

__all__ = ["Augmentation", "BatchTransform", "RandomCrop", "RandomFlip", "channel_statistics"]


@dataclass(frozen=True)
class BatchTransform:
    """What happens to a batch between the stored tensors and the client: augmentation, then normalization.

    Attributes:
        mean: Mean of each channel, in the scale of float inputs (unsigned bytes are scaled to [0, 1] first); None for
            none.
        std: Standard deviation of each channel, above 0; None for none.
        augmentations: Applied in this order, on the stored values, before normalization.
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
            Tensor of the same shape, of the same dtype or, where bytes have become floats, from 0 to 1.
        """
        for augmentation in self.augmentations:
            inputs = augmentation(inputs, generator)
        return inputs

    def normalize(self, inputs: Tensor, *, in_place: bool = False) -> Tensor:
        """Turn stored values into float inputs.

        Args:
            inputs: Stored values, shape (B, C, ...); unsigned bytes are divided by 255, as torchvision's ``ToTensor``
                does.
            in_place: Whether floats may be changed where they are.

        Returns:
            New float tensor of the same shape; ``inputs`` itself if there is nothing to do or it was changed. Whole
            numbers wider than a byte are token ids or the like and stay as they are.

        Raises:
            ValueError: If the number of channels is not that of the mean.
        """
        outputs = inputs.float().div_(255) if inputs.dtype == torch.uint8 else inputs
        if self.mean is None or self.std is None:
            return outputs
        if inputs.ndim < 2 or inputs.shape[1] != len(self.mean):
            raise ValueError(
                f"mean and std have {len(self.mean)} channels, the inputs have shape {tuple(inputs.shape)}"
            )
        outputs = outputs.float()
        shape = (1, -1, *([1] * (inputs.ndim - 2)))
        mean = torch.tensor(self.mean, dtype=outputs.dtype, device=inputs.device).view(shape)
        std = torch.tensor(self.std, dtype=outputs.dtype, device=inputs.device).view(shape)
        return (outputs.sub(mean) if outputs is inputs and not in_place else outputs.sub_(mean)).div_(std)


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
