"""Splits and batches that come from a client's own loader: an IterableDataset, a sampler or batches of the user's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size
from torch.utils.data import DataLoader, IterableDataset

from pfl_lightning.datamodules.adapters.item_source import OneAtATime, end_workers
from pfl_lightning.datamodules.adapters.items import ItemLoader, ItemSplit
from pfl_lightning.datamodules.adapters.loading.orders import tell_epoch


class Kept:
    """A client's loader, whose persistent workers are kept until another client's turn.

    Args:
        loader: The loader.
        turns: Lets one client at a time have workers.

    Attributes:
        items: Number of items that the last pass gave, where the data set does not tell it.
    """

    def __init__(self, loader: DataLoader[Any], turns: OneAtATime) -> None:
        self.loader, self._turns = loader, turns
        self.items: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self._turns.give_to(self)
        count = 0
        for batch in self.loader:
            count += _size_of(batch)
            yield batch
        self.items = count

    @property
    def counts_epochs(self) -> bool:
        """Whether the loader's sampler has an order for each epoch."""
        own = (self.loader.sampler, self.loader.batch_sampler, getattr(self.loader.batch_sampler, "sampler", None))
        return any(callable(getattr(sampler, "set_epoch", None)) for sampler in own)

    def tell_epoch(self, epoch: int) -> None:
        """Tell the loader's sampler the epoch, as a Trainer does."""
        for sampler in (self.loader.sampler, self.loader.batch_sampler):
            tell_epoch(epoch, sampler)

    def close(self) -> None:
        """End the loader's processes."""
        end_workers(self.loader)

    def __getstate__(self) -> dict[str, Any]:
        """State without processes."""
        loader = copy.copy(self.loader)
        loader._iterator = None
        vars(loader).pop("__pl_attrs_record", None)  # of Lightning: all that was ever assigned, its processes, too
        return {**self.__dict__, "loader": loader}


class StreamSplit(ItemSplit):
    """All items that a client's own loader gives in a pass.

    Its length is that of what the loader selects of the data set. Where that is not known (a stream without a
    ``__len__``, or a data set of whole batches), it is the number of items that the last pass gave; before the first it
    is 1, or the number of batches.

    Example:
        >>> from torch.utils.data import IterableDataset, default_collate
        >>> from pfl_lightning.datamodules.adapters.item_source import ItemSource
        >>> class Stream(IterableDataset):
        ...     def __iter__(self):
        ...         return iter([0.5, 1.5, 2.5])
        >>> source = ItemSource(Stream(), default_collate)
        >>> split = StreamSplit(source, torch.arange(3), classes=torch.zeros(3, dtype=torch.int64))
        >>> [batch.tolist() for batch in split.loader(batch_size=2)]
        [[0.5, 1.5], [2.5]]
    """

    def __len__(self) -> int:
        own = self.source.loader
        tells = hasattr(self.source.dataset, "__len__") and self.source.by != "item"
        return len(self.indices) if own is None or own.items is None or tells else int(own.items)

    def split(self, size: int) -> Iterator[ItemSplit]:
        """Refuse, since a stream can only be read from its beginning.

        Raises:
            TypeError: Always.
        """
        raise TypeError("what a client's own loader gives is read from its beginning to its end and cannot be split")

    def loader(self, batch_size: int, **options: Any) -> ItemLoader:
        """Loader of batches in the stream's own order, see :meth:`ItemSplit.loader`.

        Args:
            batch_size: Items in a batch, at least 1; not used where the client's own loader says it.
            options: See :meth:`ItemSplit.loader`; ``shuffle`` has no effect.
        """
        if self._reads_items() and not options.get("shuffle"):
            return super().loader(batch_size, **options)
        own, device = self.source.loader is not None, torch.device(options.get("device", "cpu"))
        drop_last = bool(options.get("drop_last")) and not own
        super().loader(batch_size, **{**options, "drop_last": drop_last})  # for its checks
        if options.get("views", 1) != 1:
            raise ValueError(
                "what an IterableDataset, or a loader with a sampler of its own, gives is read once, and two views are "
                "two readings: give a map-style Dataset in a loader without a sampler"
            )
        draws = options.get("generator") if own and options.get("shuffle") else None
        kind = _KeptLoader if own else _StreamLoader
        return kind(self, self._size(batch_size, bool(options.get("shuffle"))), device, None, drop_last, draws)

    def _reads_items(self) -> bool:
        """Whether passes for statistics read all training items, and not what a sampler draws of them."""
        own, source = self.source.loader, self.source
        return (
            own is not None
            and not iterates_by_itself(own.loader)
            and not source.evaluated
            and not isinstance(source.dataset, IterableDataset)
        )


class _StreamLoader(ItemLoader):
    """Batches of a stream, which starts from its beginning in every epoch."""

    def __iter__(self) -> Iterator[Any]:
        source = self._split.source
        items = iter(source.dataset)
        while batch := list(islice(items, self.batch_size)):
            if len(batch) < self.batch_size and self._drop_last:
                return
            yield move_data_to_device(source.collate(batch), self._device)


class _KeptLoader(ItemLoader):
    """Batches of the client's own loader."""

    def __len__(self) -> int:
        return len(self._split.source.loader.loader)

    def __iter__(self) -> Iterator[Any]:
        own, epoch = self._split.source.loader, self.batch_sampler.epoch
        if own.counts_epochs:
            if epoch is None and self._draws is not None:  # nobody counts them: each pass has another
                epoch = int(torch.randint(2**31, (), generator=self._draws))
            own.tell_epoch(epoch or 0)
        for batch in own:
            yield move_data_to_device(batch, self._device)


def iterates_by_itself(loader: DataLoader[Any]) -> bool:
    """Whether the class of a loader has a pass of its own, which may change batches."""
    own = type(loader)
    return own.__iter__ is not DataLoader.__iter__ or own._get_iterator is not DataLoader._get_iterator


def _size_of(batch: Any) -> int:
    try:
        return int(extract_batch_size(batch))
    except (RuntimeError, MisconfigurationException):  # an object that shows no tensors
        return 1
