"""Clients' parts of a data set of anything: items are read when they are needed and collated as its owner does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule
from torch import Tensor

__all__ = ["ClientItems", "ItemLoader", "ItemSource", "ItemSplit"]


@dataclass(frozen=True)
class ItemSource:
    """A data set, and how its owner makes batches of it.

    Attributes:
        dataset: Map-style.
        collate: From a list of items to a batch.
        shuffled: Whether training batches come in a fresh order every epoch.
        datamodule: Whose hooks go with the batches, for an inner Trainer.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    shuffled: bool = True
    datamodule: LightningDataModule | None = None

    def batch(self, places: Sequence[int]) -> Any:
        """The batch of some items."""
        if hasattr(self.dataset, "__getitems__"):
            return self.collate(self.dataset.__getitems__(list(places)))
        return self.collate([self.dataset[place] for place in places])


class ItemSplit:
    """One client's training, validation or test items.

    Args:
        source: The data set.
        indices: This part's items, shape (n,), int64.
        classes: The class of every item of the data set, shape (N,).
    """

    def __init__(self, source: ItemSource, indices: Tensor, classes: Tensor) -> None:
        self.source, self.indices, self._classes = source, indices, classes

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def datamodule(self) -> LightningDataModule | None:
        """Whose hooks go with the batches."""
        return self.source.datamodule

    def split(self, size: int) -> Iterator[ItemSplit]:
        """Consecutive pieces of at most ``size`` items."""
        for indices in self.indices.split(size):
            piece = copy.copy(self)
            piece.indices = indices
            yield piece

    def class_counts(self, num_classes: int) -> Tensor:
        """Items of each class, (C,)."""
        return torch.bincount(self._classes[self.indices], minlength=num_classes)

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
    ) -> ItemLoader:
        """Batches on a device.

        Raises:
            ValueError: Several views, which the data set's own items do not have; or no batch would be left.
        """
        if views != 1:
            raise ValueError("a data set of one's own gives one view of each item: the method needs augmented views")
        if drop_last and batch_size > len(self):
            raise ValueError(f"drop_last leaves no batch: batch_size is {batch_size}, the part has {len(self)} items")
        order = generator if shuffle and self.source.shuffled else None
        return ItemLoader(self, batch_size, torch.device(device), order, drop_last)


class ItemLoader:
    """Batches of one part, read and collated in this process at every pass.

    Args:
        part: The items.
        batch_size: Items in a batch.
        device: Where the batches are delivered.
        generator: Of a fresh order for every pass; ``None`` keeps the part's own.
        drop_last: Whether an incomplete last batch is left out.

    Attributes:
        augmented: True: whether items are drawn anew at every pass is the data set's to say.
    """

    augmented = True

    def __init__(
        self, part: ItemSplit, batch_size: int, device: torch.device, generator: torch.Generator | None, drop_last: bool
    ) -> None:
        self.batch_size = batch_size
        self.dataset = part.source.dataset
        self._part, self._device, self._generator, self._drop_last = part, device, generator, drop_last

    def __len__(self) -> int:
        full, rest = divmod(len(self._part), self.batch_size)
        return full + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        indices = self._part.indices
        if self._generator is not None:
            indices = indices[torch.randperm(len(indices), generator=self._generator)]
        for places in indices.split(self.batch_size)[: len(self)]:
            yield move_data_to_device(self._part.source.batch(places.tolist()), self._device)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Not to be had: items may have any shape.

        Raises:
            TypeError: Always; it says what needs them.
        """
        raise TypeError("a data set of one's own is read batch by batch; a method on features needs FromDatasets")

    def with_inputs(self, inputs: Tensor) -> ItemLoader:
        """Not to be had, as :meth:`tensors`."""
        raise TypeError("a data set of one's own is read batch by batch; a method on features needs FromDatasets")


@dataclass(frozen=True)
class ClientItems:
    """All that one client sees of the data.

    Attributes:
        train: The items it trains on.
        validation: Items on which choices may be made; may be empty.
        test: The items it is judged by; may be empty.
    """

    train: ItemSplit
    validation: ItemSplit
    test: ItemSplit
