"""Batches of a client's split, made by indexing on the device instead of by worker processes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pfl_lightning.datamodules.clients.splits import ClientSplit


class BatchLoader:
    """Batches of one split, made by indexing on the device. :meth:`ClientSplit.loader` creates it.

    Without augmentation the split is gathered and normalized once, when first needed, and a batch is one indexing
    step. With augmentation the stored values are gathered once, and every batch is augmented and normalized again.

    Random draws come from the generator in this order: at the start of an epoch the permutation (if shuffled), then for
    each batch its augmentations in their order. Several views of a batch are augmented together, as one batch of B * V
    images in which the views of a sample are neighbors. This is faster than view by view, and the result already has
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
        *,
        device: torch.device,
        generator: torch.Generator | None,
        shuffle: bool,
        drop_last: bool,
        augment: bool,
        views: int = 1,
    ) -> None:
        self.batch_size = batch_size
        self.views = views
        self.num_samples = len(split)
        self.augmented = augment and len(split.transform.augmentations) > 0
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if views < 1:
            raise ValueError(f"views must be at least 1, got {views}: 1 for plain batches, 2 for pairs of views")
        if generator is None and (shuffle or self.augmented):
            raise ValueError("a loader that shuffles or augments needs a generator: pass generator=torch.Generator()")
        if drop_last and batch_size > self.num_samples:
            raise ValueError(
                f"drop_last leaves no batch: batch_size is {batch_size}, the split has {self.num_samples} samples; "
                f"lower batch_size to at most {self.num_samples}, set drop_last=False, or give clients more samples"
            )
        self._split = split
        self._device = device
        self._generator = generator
        self._shuffle = shuffle
        self._raw: Tensor | None = None
        self._ready: tuple[Tensor, Tensor] | None = None
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
            order = torch.randperm(self.num_samples, generator=self._generator).to(self._device)
        elif self.augmented:  # by numbers, too: rows that are changed are copies
            order = torch.arange(self.num_samples, device=self._device)
        inputs, targets = self._raw_tensors() if self.augmented else self.tensors()
        for start in range(0, self._num_batches * self.batch_size, self.batch_size):
            batch = slice(start, start + self.batch_size) if order is None else order[start : start + self.batch_size]
            rows = _rows(inputs, batch)
            rows = rows if self.views == 1 else rows.repeat_interleave(self.views, dim=0)
            if self.augmented:
                transform = self._split.transform
                rows = transform.normalize(transform.augment(rows, self._generator), in_place=True)
            rows = rows if self.views == 1 else rows.unflatten(0, (-1, self.views))
            given = (rows, _rows(targets, batch))
            yield given if self._values is None else (*given, _rows(self._values, batch))

    def _raw_tensors(self) -> tuple[Tensor, Tensor]:
        if self._raw is None:
            self._raw = self._split.raw_inputs.to(self._device)
        return self._raw, self._targets()

    def _targets(self) -> Tensor:
        return self._split.targets.to(self._device) if self._ready is None else self._ready[1]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All samples of the split in its order, normalized and never augmented.

        Returns:
            Inputs of shape (n, ...) and classes of shape (n,), on the device. Do not change them in place: batches
            without augmentation are taken from them.
        """
        if self._ready is None:
            inputs = self._split.transform.normalize(self._split.raw_inputs.to(self._device))
            self._ready = (inputs, self._split.targets.to(self._device))
        return self._ready

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
            raise ValueError(f"expected one input per sample of the split ({self.num_samples}), got {len(inputs)}")
        other = copy.copy(self)
        other.augmented, other._raw, other._ready = False, None, (inputs, self._targets())
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


def _rows(values: Tensor, batch: slice | Tensor) -> Tensor:
    return values[batch] if isinstance(batch, slice) else values.index_select(0, batch)
