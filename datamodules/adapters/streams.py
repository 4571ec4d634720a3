"""Splits and batches of a data set that gives its items one after another (an IterableDataset)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device

from pfl_lightning.datamodules.adapters.items import ItemLoader, ItemSplit

__all__ = ["StreamSplit"]


class StreamSplit(ItemSplit):
    """All items of one client's stream; its length is what the stream says.

    Example:
        >>> from torch.utils.data import IterableDataset, default_collate
        >>> from pfl_lightning.datamodules.adapters.items import ItemSource
        >>> class Stream(IterableDataset):
        ...     def __iter__(self):
        ...         return iter([0.5, 1.5, 2.5])
        >>> source = ItemSource(Stream(), default_collate)
        >>> split = StreamSplit(source, torch.arange(3), classes=torch.zeros(3, dtype=torch.int64))
        >>> [batch.tolist() for batch in split.loader(batch_size=2)]
        [[0.5, 1.5], [2.5]]
    """

    def split(self, size: int) -> Iterator[ItemSplit]:
        """Refuse, since a stream can only be read from its beginning.

        Raises:
            TypeError: Always.
        """
        raise TypeError("an IterableDataset is read from its beginning to its end and cannot be split")

    def loader(self, batch_size: int, **options: Any) -> ItemLoader:
        """Loader of batches in the stream's own order, see :meth:`ItemSplit.loader`.

        Args:
            batch_size: Items in a batch, at least 1.
            options: See :meth:`ItemSplit.loader`; ``shuffle`` has no effect.
        """
        drop_last = bool(options.get("drop_last"))
        super().loader(batch_size, **options)  # for its checks
        if options.get("views", 1) != 1:
            raise ValueError("an IterableDataset gives one view of each item: give a map-style Dataset for two of them")
        return _StreamLoader(self, batch_size, torch.device(options.get("device", "cpu")), None, drop_last)


class _StreamLoader(ItemLoader):
    """Batches of a stream, which starts from its beginning in every epoch."""

    def __iter__(self) -> Iterator[Any]:
        source = self._split.source
        items = iter(source.dataset)
        while batch := list(islice(items, self.batch_size)):
            if len(batch) < self.batch_size and self._drop_last:
                return
            yield move_data_to_device(source.collate(batch), self._device)
