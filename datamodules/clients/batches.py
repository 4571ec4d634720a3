"""Batches of a client's split, made, augmented and normalized on the device instead of by worker processes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pfl_lightning.data import to_device
from pfl_lightning.datamodules.augmentation.ops import Augmentation, Generators

if TYPE_CHECKING:
    from pfl_lightning.datamodules.clients.splits import ClientSplit


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

    def augment(self, inputs: Tensor, generator: Generators = None) -> Tensor:
        """Apply the augmentations.

        Args:
            inputs: Stored values, shape (B, C, H, W).
            generator: CPU generator of all random draws, or those of several clients, whose images follow one another:
                each client's draws are its own.

        Returns:
            Tensor of the same shape; of the same dtype, or floats from 0 to 1 if an augmentation converts bytes.
        """
        for augmentation in self.augmentations:
            if isinstance(generator, tuple) and not vars(type(augmentation)).get("takes_parts", False):
                parts = inputs.split([count for _, count in generator])
                inputs = torch.cat([augmentation(part, own) for part, (own, _) in zip(parts, generator, strict=True)])
            else:
                inputs = augmentation(inputs, cast(Any, generator))
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
        numbers = _numbers.__wrapped__ if inputs.device.type == "cpu" else _numbers
        mean, std = (numbers(values, outputs.dtype, inputs.device).view(shape) for values in (self.mean, self.std))
        return (outputs.sub(mean) if outputs is inputs and not in_place else outputs.sub_(mean)).div_(std)


@lru_cache(maxsize=64)
def _numbers(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, sent once."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


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


class BatchLoader:
    """Batches of one split, made by indexing on the device. :meth:`ClientSplit.loader` creates it.

    Without augmentation the split is gathered and normalized once, when first needed, and a batch is one indexing
    step. With augmentation the stored values are gathered once, and every batch is augmented and normalized again.

    Random draws come from the generator in this order: at the start of an epoch the permutation (if shuffled), then for
    each batch its augmentations in their order. Several views of a batch are augmented together, as one batch of B * V
    images in which the views of a sample are neighbors. This is faster than view by view, and the result already has
    shape (B, V, ...).

    Args:
        split: The split.
        batch_size: Samples in a batch, at least 1.
        device: Device on which the batches are made.
        generator: CPU generator of the order and of the augmentation.
        shuffle: Whether every epoch has a new random order.
        drop_last: Whether an incomplete last batch is dropped.
        augment: Whether the training augmentation is applied.
        views: Number V of independently augmented copies of every sample in a batch; above 1, a batch's inputs have
            shape (B, V, ...).

    Attributes:
        batch_size: Samples in a full batch.
        views: Number V of copies of every sample in a batch.
        num_samples: Samples of the split, including those in a dropped batch.
        augmented: True if batches are augmented, so that features of one epoch cannot be reused in the next.

    Example:
        Two augmented views of every sample, as contrastive methods need them:

        >>> import torch
        >>> from pfl_lightning.datamodules import BatchTransform, ClientSplit, RandomFlip
        >>> images, targets = torch.rand(10, 3, 8, 8), torch.zeros(10, dtype=torch.int64)
        >>> split = ClientSplit(images, targets, torch.arange(10), BatchTransform(augmentations=(RandomFlip(),)))
        >>> generator = torch.Generator().manual_seed(0)
        >>> loader = split.loader(4, generator=generator, shuffle=True, drop_last=True, augment=True, views=2)
        >>> len(loader), [tuple(inputs.shape) for inputs, _ in loader]
        (2, [(4, 2, 3, 8, 8), (4, 2, 3, 8, 8)])
    """

    def __init__(
        self,
        split: ClientSplit,
        batch_size: int,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        augment: bool = False,
        views: int = 1,
    ) -> None:
        self.batch_size, self.views, self.num_samples = batch_size, views, len(split)
        self.augmented = augment and len(split.transform.augmentations) > 0
        for name, value in (("batch_size", batch_size), ("views", views)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if generator is None and (shuffle or self.augmented):
            raise ValueError("a loader that shuffles or augments needs a generator: pass generator=torch.Generator()")
        if drop_last and batch_size > self.num_samples:
            raise ValueError(
                f"drop_last leaves no batch: batch_size is {batch_size}, the split has {self.num_samples} samples; "
                f"lower batch_size to at most {self.num_samples}, set drop_last=False, or give clients more samples"
            )
        self._split, self._device, self._generator, self._shuffle = split, torch.device(device), generator, shuffle
        self._targets = split.targets.to(device)
        self._raw: Tensor | None = None
        self._ready: Tensor | None = None  # normalized
        self._values: Tensor | None = None

        full, rest = divmod(self.num_samples, batch_size)
        self._num_batches = full + (rest > 0 and not drop_last)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Iterate over one epoch of pairs (inputs, targets), or of triples (inputs, targets, values).

        Yields:
            Float inputs of shape (B, ...), or (B, V, ...) with several views, int64 classes of shape (B,), and the
            values of shape (B, ...) that :meth:`with_values` has given, if it has.
        """
        order = None
        if self._shuffle:
            order = torch.randperm(self.num_samples, generator=self._generator)
            order = order if self._device.type == "cpu" else to_device(order, self._device)
        elif self.augmented:  # by numbers, too: rows that are changed are copies
            order = torch.arange(self.num_samples, device=self._device)
        parts: Any = self.stored() if self.augmented else self.tensors()
        parts = parts if self._values is None else (*parts, self._values)
        for start in range(0, self._num_batches * self.batch_size, self.batch_size):
            batch: Any = (
                slice(start, start + self.batch_size) if order is None else order[start : start + self.batch_size]
            )
            rows, *given = (part[batch] if order is None else part.index_select(0, batch) for part in parts)
            rows = rows if self.views == 1 else rows.repeat_interleave(self.views, dim=0)
            if self.augmented:
                rows = self.transformed(rows, self._generator)
            yield rows if self.views == 1 else rows.unflatten(0, (-1, self.views)), *given

    @property
    def transform(self) -> BatchTransform:
        """Augmentation and normalization of the split."""
        return self._split.transform

    def stored(self) -> tuple[Tensor, Tensor]:
        """All samples of the split in its order, as stored: inputs (n, ...) and classes (n,), on the device."""
        if self._raw is None:
            self._raw = self._split.inputs_on(self._device)
        return self._raw, self._targets

    def transformed(self, inputs: Tensor, generator: Generators) -> Tensor:
        """Stored inputs, (B, ...), augmented and normalized; see :meth:`BatchTransform.augment`."""
        return self.transform.normalize(self.transform.augment(inputs, generator), in_place=True)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All samples of the split in its order, normalized and never augmented.

        Returns:
            Inputs of shape (n, ...) and classes of shape (n,), on the device. Do not change them in place: batches
            without augmentation are taken from them.
        """
        if self._ready is None:
            self._ready = self._split.transform.normalize(self._split.inputs_on(self._device))
        return self._ready, self._targets

    def with_inputs(self, inputs: Tensor) -> BatchLoader:
        """Loader of the same batches with other inputs, for instance with precomputed features.

        The new loader draws its order from the same generator object, has the same batch size and number of views, and
        applies no transform.

        Args:
            inputs: One row per sample of the split, in the order of the split, shape (n, ...).

        Returns:
            A new loader; this one is unchanged.

        Raises:
            ValueError: If the number of rows is not n.

        Example:
            >>> import torch
            >>> from pfl_lightning.datamodules import BatchTransform, ClientSplit
            >>> split = ClientSplit(torch.rand(3, 8), torch.tensor([0, 1, 2]), torch.arange(3), BatchTransform())
            >>> features = torch.tensor([[1.0], [2.0], [3.0]])
            >>> [(x.tolist(), y.tolist()) for x, y in split.loader(batch_size=2).with_inputs(features)]
            [([[1.0], [2.0]], [0, 1]), ([[3.0]], [2])]
        """
        if len(inputs) != self.num_samples:
            raise ValueError(f"expected one row per sample of the split ({self.num_samples}), got {len(inputs)}")
        other = copy.copy(self)
        other.augmented, other._raw, other._ready = False, None, inputs
        return other

    def with_values(self, values: Tensor) -> BatchLoader:
        """Loader of the same batches, each with the values of its samples as a third part.

        Args:
            values: One value per sample of the split, in the order of the split, shape (n, ...), on the device.

        Returns:
            A new loader, which draws its order from the same generator object; this one is unchanged.

        Raises:
            ValueError: If the number of values is not n.

        Example:
            >>> import torch
            >>> from pfl_lightning.datamodules import BatchTransform, ClientSplit
            >>> split = ClientSplit(torch.rand(3, 8), torch.tensor([0, 1, 2]), torch.arange(3), BatchTransform())
            >>> loader = split.loader(batch_size=2).with_values(torch.tensor([0.1, 0.2, 0.3]))
            >>> [(y.tolist(), [round(q, 1) for q in values.tolist()]) for _, y, values in loader]
            [([0, 1], [0.1, 0.2]), ([2], [0.3])]
        """
        if len(values) != self.num_samples:
            raise ValueError(f"expected one value per sample of the split ({self.num_samples}), got {len(values)}")
        other = copy.copy(self)
        other._values = values
        return other
