"""The clients' views of the data: index lists into tensors that all clients share, batched without worker processes."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from pfl_lightning.datamodules.clients.transforms import BatchTransform

NO_LABEL = -1
"""The class of a sample that has none."""


class ClientSplit:
    """One client's training, validation or test samples.

    A part holds an index and references; the samples themselves are shared by all clients and never copied before a
    loader gathers them.

    Args:
        inputs: Stored inputs of the whole data set, shape (N, ...), unsigned bytes or floats.
        targets: Classes of the whole data set, shape (N,), int64.
        indices: This part's samples, shape (n,), int64.
        transform: Normalization and augmentation.
    """

    datamodule: LightningDataModule | None = None

    def __init__(self, inputs: Tensor, targets: Tensor, indices: Tensor, transform: BatchTransform) -> None:
        self.indices = indices
        self.transform = transform
        self._inputs = inputs
        self._targets = targets

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def targets(self) -> Tensor:
        """Classes of the part's samples, shape (n,), int64."""
        return self._targets.index_select(0, self.indices)

    @property
    def raw_inputs(self) -> Tensor:
        """Stored inputs of the part's samples, shape (n, ...), as they are before augmentation and normalization."""
        return self._inputs.index_select(0, self.indices)

    def split(self, size: int) -> Iterator[ClientSplit]:
        """Consecutive pieces of the part, for passes that shall not hold all of its inputs at once.

        Args:
            size: Samples in a piece; the last may have fewer.
        """
        for indices in self.indices.split(size):
            piece = copy.copy(self)
            piece.indices = indices
            yield piece

    def select(self, positions: Tensor) -> ClientSplit:
        """The part's samples at these positions.

        Args:
            positions: Whole numbers from 0 to n - 1, shape (k,).
        """
        piece = copy.copy(self)
        piece.indices = self.indices[positions]
        return piece

    def class_counts(self, num_classes: int) -> Tensor:
        """Samples of each class; those without a class count nowhere.

        Args:
            num_classes: Number of classes C.

        Returns:
            Whole numbers, shape (C,), int64.
        """
        targets = self.targets
        return torch.bincount(targets[targets != NO_LABEL], minlength=num_classes)

    def loader(
        self,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        augment: bool = False,
        views: int = 1,
    ) -> BatchLoader:
        """Make a loader of batches.

        Args:
            batch_size: Samples in a batch, at least 1.
            device: Where the batches are made.
            generator: CPU generator of the order and of the augmentation.
            shuffle: Whether every epoch has a fresh order.
            drop_last: Whether a last batch smaller than the others is left out.
            augment: Whether the training augmentation is applied.
            views: Copies of every sample in a batch, each augmented by draws of its own; above 1, a batch's inputs have
                shape (B, V, ...).

        Returns:
            A re-iterable loader; every pass is one epoch.

        Raises:
            ValueError: If an argument is out of range, a generator is missing, or no batch would be left.
        """
        return BatchLoader(
            self,
            batch_size,
            device=torch.device(device),
            generator=generator,
            shuffle=shuffle,
            drop_last=drop_last,
            augment=augment,
            views=views,
        )


class BatchLoader:
    """Batches of one part, made by indexing on the device.

    Without augmentation the part is gathered and normalized once, when first needed, and a batch is one indexing
    step. With augmentation the stored values are gathered once, and every batch is augmented and normalized afresh.
    Random draws come from the generator in this order: at the start of an epoch the permutation (if shuffled), then for
    each batch its augmentations in their order. Several views of a batch are augmented together, as one batch of B * V
    images in which the views of a sample stand side by side: that is faster than view by view, and the result is
    already of shape (B, V, ...).

    Attributes:
        batch_size: Samples in a full batch.
        views: Copies of every sample in a batch, V.
        num_samples: Samples of the part, those in a dropped batch included.
        augmented: True if batches are really augmented, so that features of one epoch do not serve the next.
    """

    def __init__(
        self,
        part: ClientSplit,
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
        self.num_samples = len(part)
        self.augmented = augment and len(part.transform.augmentations) > 0
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if views < 1:
            raise ValueError(f"views must be at least 1, got {views}: 1 for plain batches, 2 for pairs of views")
        if generator is None and (shuffle or self.augmented):
            raise ValueError("a loader that shuffles or augments needs a generator: pass generator=torch.Generator()")
        if drop_last and batch_size > self.num_samples:
            raise ValueError(
                f"drop_last leaves no batch: batch_size is {batch_size}, the part has {self.num_samples} samples; "
                f"lower batch_size to at most {self.num_samples}, set drop_last=False, or give clients more samples"
            )
        self._part = part
        self._device = device
        self._generator = generator
        self._shuffle = shuffle
        self._raw: Tensor | None = None
        self._ready: tuple[Tensor, Tensor] | None = None

        full, rest = divmod(self.num_samples, batch_size)
        self._num_batches = full + (rest > 0 and not drop_last)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of (inputs, targets).

        Yields:
            Float inputs of shape (B, ...), or (B, V, ...) with several views, and int64 classes of shape (B,).
        """
        order = None
        if self._shuffle:
            order = torch.randperm(self.num_samples, generator=self._generator).to(self._device)
        if self.augmented:
            yield from self._augmented_batches(order)
            return
        inputs, targets = self.tensors()
        for start in range(0, self._num_batches * self.batch_size, self.batch_size):
            if order is None:
                rows, labels = inputs[start : start + self.batch_size], targets[start : start + self.batch_size]
            else:
                batch = order[start : start + self.batch_size]
                rows, labels = inputs.index_select(0, batch), targets.index_select(0, batch)
            yield rows if self.views == 1 else self._grouped(self._repeated(rows)), labels

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The whole part in its own order, normalized and never augmented.

        Returns:
            Inputs of shape (n, ...) and classes of shape (n,), on the device. Not to be changed in place: batches
            without augmentation are taken from them.
        """
        if self._ready is None:
            inputs = self._part.transform.normalize(self._part.raw_inputs.to(self._device))
            self._ready = (inputs, self._part.targets.to(self._device))
        return self._ready

    def with_inputs(self, inputs: Tensor) -> BatchLoader:
        """The same batches of other inputs, for instance of features computed beforehand.

        The new loader draws its order from the same generator object, has the same batch size and number of views, and
        applies no transform.

        Args:
            inputs: One row for each sample of the part, in the part's own order, shape (n, ...).

        Returns:
            A new loader; this one stays as it is.

        Raises:
            ValueError: If the number of rows is another.
        """
        if len(inputs) != self.num_samples:
            raise ValueError(f"expected one input for each of the part's {self.num_samples} samples, got {len(inputs)}")
        targets = self._ready[1] if self._ready is not None else self._part.targets.to(self._device)
        other = copy.copy(self)
        other.augmented = False
        other._raw = None
        other._ready = (inputs, targets)
        return other

    def _augmented_batches(self, order: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        if self._raw is None:
            self._raw = self._part.raw_inputs.to(self._device)
        targets = self._ready[1] if self._ready is not None else self._part.targets.to(self._device)
        order = torch.arange(self.num_samples, device=self._device) if order is None else order
        for start in range(0, self._num_batches * self.batch_size, self.batch_size):
            batch = order[start : start + self.batch_size]
            rows = self._raw.index_select(0, self._repeated(batch))
            inputs = self._part.transform.normalize(self._part.transform.augment(rows, self._generator), in_place=True)
            yield self._grouped(inputs), targets.index_select(0, batch)

    def _repeated(self, rows: Tensor) -> Tensor:
        """Every row as often as there are views, (B * V, ...)."""
        return rows if self.views == 1 else rows.repeat_interleave(self.views, dim=0)

    def _grouped(self, rows: Tensor) -> Tensor:
        """The views of each sample in a dimension of their own, (B, V, ...)."""
        return rows if self.views == 1 else rows.unflatten(0, (-1, self.views))
