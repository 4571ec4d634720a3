"""Augmentation and normalization of a client's batches, computed for whole batches on their device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_lightning.datamodules.augmentation.ops import Augmentation


@dataclass(frozen=True)
class BatchTransform:
    """Transform of a batch of stored values: augmentation, then normalization.

    Attributes:
        mean: Mean of each channel, in the scale of float inputs (unsigned bytes are scaled to [0, 1] first); None for
            no normalization.
        std: Standard deviation of each channel, above 0; given together with ``mean``.
        augmentations: Augmentations, applied in this order to the stored values, before normalization.

    Raises:
        ValueError: If only one of ``mean`` and ``std`` is given, their lengths differ, or a deviation is not above 0.

    Example:
        >>> import torch
        >>> from pfl_lightning.datamodules import BatchTransform
        >>> transform = BatchTransform(mean=(0.5,), std=(0.25,))
        >>> transform.normalize(torch.tensor([[[[0, 255]]]], dtype=torch.uint8)).tolist()
        [[[[-2.0, 2.0]]]]
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
            Tensor of the same shape; of the same dtype, or floats from 0 to 1 if an augmentation converts bytes.
        """
        for augmentation in self.augmentations:
            inputs = augmentation(inputs, generator)
        return inputs

    def normalize(self, inputs: Tensor, *, in_place: bool = False) -> Tensor:
        """Convert stored values to float inputs.

        Args:
            inputs: Stored values, shape (B, C, ...); unsigned bytes are divided by 255, as torchvision's ``ToTensor``
                does.
            in_place: Whether float inputs may be changed in place.

        Returns:
            New float tensor of the same shape; ``inputs`` itself if there is nothing to do or it was changed in place.
            Integers wider than a byte (token ids, for instance) are unchanged without mean and std.

        Raises:
            ValueError: If the number of channels differs from that of the mean.
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
        chunk: Samples that are processed at a time, which bounds the memory needed.

    Returns:
        Mean and deviation of each channel in the scale [0, 1]; a deviation of 0 (a constant channel) becomes 1.

    Example:
        >>> images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
        >>> channel_statistics(images)
        ((0.5,), (0.5,))
    """
    # Histograms of bytes are exact whatever the order of summation, and one pass gives both moments.
    histogram = torch.zeros(inputs.shape[1], 256, dtype=torch.int64)
    for piece in inputs.split(chunk):
        for channel in range(inputs.shape[1]):
            histogram[channel] += torch.bincount(piece[:, channel].reshape(-1), minlength=256)
    shares = histogram.double() / histogram.sum(dim=1, keepdim=True).clamp_min(1)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = shares @ values
    std = (shares * (values - mean[:, None]) ** 2).sum(dim=1).sqrt()
    std = torch.where(std > 0, std, torch.ones_like(std))
    return tuple(mean.tolist()), tuple(std.tolist())
