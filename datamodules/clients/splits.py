"""Splits: the samples of a client, or those that all clients have, as index lists into shared tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from pfl_lightning.data import LoaderOptions, copy_on, to_device
from pfl_lightning.datamodules.augmentation.ops import Augmentation
from pfl_lightning.datamodules.clients.batches import BatchLoader, BatchTransform
from pfl_lightning.datamodules.clients.views import ClientView
from pfl_lightning.options import Unpack

NO_LABEL = -1
"""Target of a sample without a label."""


class ClientSplit:
    """One client's training, validation or test samples.

    A split holds an index list and references. The samples themselves are shared by all clients and are not copied
    before a loader gathers them.

    Args:
        inputs: Stored inputs of the whole data set, shape (N, ...), unsigned bytes or floats.
        targets: Classes of the whole data set, shape (N,), int64.
        indices: Samples of this split, shape (n,), int64.
        transform: Normalization and augmentation.
        view: The client's view of its samples; None for the samples as they are stored.

    Example:
        >>> import torch
        >>> from pfl_lightning.datamodules import BatchTransform, ClientSplit
        >>> inputs, targets = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])
        >>> split = ClientSplit(inputs, targets, torch.tensor([1, 3, 4]), BatchTransform())
        >>> len(split), split.targets.tolist(), split.class_counts(num_classes=3).tolist()
        (3, [1, 0, 1], [1, 2, 0])
        >>> [x.tolist() for x, _ in split.loader(batch_size=2)]
        [[[2.0, 3.0], [6.0, 7.0]], [[8.0, 9.0]]]
    """

    datamodule: LightningDataModule | None = None

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        indices: Tensor,
        transform: BatchTransform,
        view: ClientView | None = None,
    ) -> None:
        self.indices, self.transform, self.view = indices, transform, view
        self._inputs, self._targets = inputs, targets

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def targets(self) -> Tensor:
        """Classes of the samples as the client sees them, shape (n,), int64."""
        stored = self._targets.index_select(0, self.indices)
        return stored if self.view is None else self.view.targets(stored)

    @property
    def raw_inputs(self) -> Tensor:
        """Inputs of the samples as the client sees them, shape (n, ...), before augmentation and normalization."""
        return self.inputs_on(torch.device("cpu"))

    def inputs_on(self, device: torch.device) -> Tensor:
        """The same inputs on a device, from the data set's copy there if it has one.

        Args:
            device: The device.
        """
        whole = copy_on(device, self._inputs) if device.type != "cpu" and self.view is None else None
        if whole is not None:
            return whole.index_select(0, to_device(self.indices, device))
        stored = self._inputs.index_select(0, self.indices)
        return (stored if self.view is None else self.view.inputs(stored)).to(device)

    def split(self, size: int) -> Iterator[ClientSplit]:
        """Consecutive pieces of this split, for passes that must not hold all inputs at once.

        Args:
            size: Samples in a piece; the last may have fewer.
        """
        for indices in self.indices.split(size):
            piece = copy.copy(self)
            piece.indices = indices
            yield piece

    def select(self, positions: Tensor) -> ClientSplit:
        """Split of the samples at the given positions.

        Args:
            positions: Whole numbers from 0 to n - 1, shape (k,), int64.

        Returns:
            A split of k samples that shares the stored tensors.
        """
        piece = copy.copy(self)
        piece.indices = self.indices[positions]
        return piece

    def with_augmentations(self, augmentations: tuple[Augmentation, ...]) -> ClientSplit:
        """The same samples under other augmentations, applied in this order where a loader augments."""
        other = copy.copy(self)
        other.transform = replace(self.transform, augmentations=augmentations)
        return other

    def class_counts(self, num_classes: int) -> Tensor:
        """Number of samples of each class; samples without a label are not counted.

        Args:
            num_classes: Number of classes C.

        Returns:
            Whole numbers, shape (C,), int64.
        """
        targets = self.targets
        return torch.bincount(targets[targets != NO_LABEL], minlength=num_classes)

    def loader(self, batch_size: int, **options: Unpack[LoaderOptions]) -> BatchLoader:
        """Loader of batches of this split.

        Args:
            batch_size: Samples in a batch, at least 1.
            options: See :class:`BatchLoader`.

        Returns:
            A re-iterable loader; every pass is one epoch.

        Raises:
            ValueError: If an argument is out of range, a generator is missing, or no batch would be left.
        """
        return BatchLoader(self, batch_size, **options)


class PublicSplit(ClientSplit):
    """Public samples, whose targets are -1.

    Args:
        inputs: See :class:`ClientSplit`.
        targets: See :class:`ClientSplit`.
        indices: See :class:`ClientSplit`.
        transform: See :class:`ClientSplit`.
        classes: Classes of the whole data set, shape (N,), where they are known; None otherwise.
    """

    def __init__(
        self, inputs: Tensor, targets: Tensor, indices: Tensor, transform: BatchTransform, classes: Tensor | None = None
    ) -> None:
        super().__init__(inputs, targets, indices, transform)
        self._classes = classes

    @property
    def classes(self) -> Tensor | None:
        """Classes of the samples, shape (n,), for methods that train on them; None for images of a folder."""
        return None if self._classes is None else self._classes.index_select(0, self.indices)


class JoinedSplit(ClientSplit):
    """Two splits of one client as one: the samples of the first, then those of the second.

    Args:
        first: A split.
        second: A split with inputs of the same shape and dtype, and the same transform.

    Example:
        >>> import torch
        >>> from pfl_lightning.datamodules import BatchTransform, ClientSplit
        >>> labeled = ClientSplit(torch.rand(2, 4), torch.tensor([3, 5]), torch.arange(2), BatchTransform())
        >>> unlabeled = ClientSplit(torch.rand(1, 4), torch.tensor([-1]), torch.arange(1), BatchTransform())
        >>> both = JoinedSplit(labeled, unlabeled)
        >>> both.targets.tolist(), both.raw_inputs.shape
        ([3, 5, -1], torch.Size([3, 4]))
    """

    def __init__(self, first: ClientSplit, second: ClientSplit) -> None:
        self.indices = torch.cat([first.indices, second.indices])  # each into the stored samples of its split
        self.transform = first.transform
        self._joined = (first, second)

    @property
    def targets(self) -> Tensor:
        """Classes of the samples, shape (n,), int64."""
        return torch.cat([split.targets for split in self._joined])

    def inputs_on(self, device: torch.device) -> Tensor:
        """See :meth:`ClientSplit.inputs_on`."""
        return torch.cat([split.inputs_on(device) for split in self._joined])

    def select(self, positions: Tensor) -> ClientSplit:
        """Refuse, since positions alone do not identify the split.

        Raises:
            TypeError: Always.
        """
        raise TypeError("cannot select from labeled and unlabeled samples together: select from one of the two splits")

    def split(self, size: int) -> Iterator[ClientSplit]:
        """Consecutive pieces, first of one split, then of the other.

        Args:
            size: Samples in a piece; the last of each split may have fewer.
        """
        for split in self._joined:
            yield from split.split(size)


@dataclass(frozen=True)
class ClientData:
    """Splits of one client.

    Attributes:
        train: Training samples.
        validation: Samples held out from the client's own training data; may be empty.
        test: Test samples, in the class proportions of the client's own training data.
        unlabeled: Additional samples without labels, for self-supervised methods; may be empty.
    """

    train: ClientSplit
    validation: ClientSplit
    test: ClientSplit
    unlabeled: ClientSplit

    @property
    def train_and_unlabeled(self) -> ClientSplit:
        """Training split of a self-supervised method; unlabeled samples have the class -1."""
        return JoinedSplit(self.train, self.unlabeled) if len(self.unlabeled) else self.train
