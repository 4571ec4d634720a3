"""Splits and batches of a client's own loader, read as it is, and of several loaders of one stage, combined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import IterableDataset

from pfl_lightning.datamodules.adapters.items import ItemLoader, ItemSplit, no_tensors
from pfl_lightning.datamodules.adapters.sources import ItemSource
from pfl_lightning.datamodules.adapters.workers import iterates_by_itself
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.lightning_private import combining_mode


class StreamSplit(ItemSplit):
    """All items that a client's own loader gives in a pass.

    Its length is that of what the loader selects of the data set. Where that is not known (a stream without a
    ``__len__``, or a data set of whole batches), it is the number of items that the last pass gave; before the first it
    is 1, or the number of batches.

    Example:
        >>> from torch.utils.data import IterableDataset, default_collate
        >>> from pfl_lightning.datamodules.adapters.sources import ItemSource
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
        raise TypeError("a client's own loader is read from beginning to end and cannot be split")

    def loader(self, batch_size: int, **options: Any) -> ItemLoader:
        """Loader of batches in the stream's own order, see :meth:`ItemSplit.loader`.

        Args:
            batch_size: Items in a batch, at least 1; not used where the client's own loader says it.
            options: See :meth:`ItemSplit.loader`; ``shuffle`` has no effect.
        """
        source, own = self.source, self.source.loader is not None
        indexed = own and not (isinstance(source.dataset, IterableDataset) or iterates_by_itself(source.loader.loader))
        if indexed and not (source.evaluated or options.get("shuffle")):  # for statistics: all, not what is drawn
            return super().loader(batch_size, **options)
        device = torch.device(options.get("device", "cpu"))
        drop_last = bool(options.get("drop_last")) and not own
        super().loader(batch_size, **{**options, "drop_last": drop_last})  # for its checks
        if options.get("views", 1) != 1:
            raise ValueError(
                "two views need two readings of an item, but an IterableDataset, or a loader with its own sampler, is "
                "read once: use a map-style Dataset in a loader without a sampler"
            )
        draws = options.get("generator") if own and options.get("shuffle") else None
        kind = _KeptLoader if own else _StreamLoader
        return kind(self, self._size(batch_size, bool(options.get("shuffle"))), device, None, drop_last, draws)


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


class CombinedSplit:
    """One client's items of several data sets.

    Args:
        parts: Its items of each of them.
        shape: How their batches are combined.

    Example:
        >>> import torch
        >>> from torch.utils.data import default_collate
        >>> from pfl_lightning.datamodules.adapters.sources import BatchSizes, ItemSource
        >>> source = ItemSource([0, 1, 2, 3], default_collate, batches=BatchSizes(2, 2, False))
        >>> parts = [ItemSplit(source, torch.tensor(own), torch.zeros(4)) for own in ([0, 1, 2], [3])]
        >>> from torch.utils.data import DataLoader
        >>> from pfl_lightning.datamodules.adapters.stages import StageLoaders
        >>> shape = StageLoaders.of({"a": DataLoader([0]), "b": DataLoader([0])}, training=True).shape
        >>> for batch in CombinedSplit(parts, shape).loader(2).batches():
        ...     print({name: own.tolist() for name, own in batch.items()})
        {'a': [0, 1], 'b': [3]}
        {'a': [2], 'b': [3]}
    """

    def __init__(self, parts: Sequence[ItemSplit], shape: CombinedLoader) -> None:
        self.parts, self.shape, self.datamodule = tuple(parts), shape, parts[0].datamodule

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of items of each data set."""
        return tuple(len(part) for part in self.parts)

    def class_counts(self, num_classes: int) -> Tensor:
        """Number of items of each class in the first data set, shape (C,)."""
        return self.parts[0].class_counts(num_classes)

    def split(self, size: int) -> Iterator[ItemSplit]:
        """Refuse, since batches belong together.

        Raises:
            TypeError: Always.
        """
        raise TypeError("items of several loaders belong together and cannot be split")

    def loader(self, batch_size: int, **options: Any) -> CombinedBatches:
        """Loader of combined batches; every data set has its own loader's sizes.

        Args:
            batch_size: Not used.
            options: See :meth:`ItemSplit.loader`; ``drop_last`` is each loader's own.

        Raises:
            ValueError: Two views are asked for.
        """
        if options.get("views", 1) != 1:
            raise ValueError(
                f"two views of each item need one training loader, and there are {len(self.parts)}: return one "
                "loader from train_dataloader, or use a method with one view"
            )
        made = []
        for part in self.parts:
            own = part.source.batches
            dropped = own.drop_last and bool(options.get("shuffle"))
            made.append(part.loader(own.batch_size, **{**options, "drop_last": dropped}))
        return CombinedBatches(self.shape, made)


class CombinedBatches(CombinedLoader):
    """Batches of several loaders, combined as a Trainer does, to which this is a CombinedLoader.

    Args:
        shape: How they are combined.
        loaders: The loaders.

    Attributes:
        augmented: Always true, see :class:`ItemLoader`.
    """

    augmented = True

    def __init__(self, shape: CombinedLoader, loaders: Sequence[ItemLoader]) -> None:
        super().__init__(shape.iterables, combining_mode(shape))
        self.flattened = list(loaders)
        self.batch_size = loaders[0].batch_size

    def __len__(self) -> int:
        if self._iterator is None:
            iter(self)
        return super().__len__()

    def batches(self) -> Iterator[Any]:
        """The batches alone; iteration gives the number of the batch and of its loader, too."""
        return (batch for batch, _, _ in self)

    tensors = with_inputs = no_tensors


def joined(
    sources: Sequence[ItemSource], indices: Sequence[Any], classes: Sequence[Ints], shape: CombinedLoader | None
) -> Any:
    """One client's items of a stage: those of its loader, or of several, combined.

    Args:
        sources: What the loaders read.
        indices: The client's items of each.
        classes: Class of every item of each.
        shape: How they are combined; ``None`` for a single loader.
    """
    parts = [
        (StreamSplit if source.is_read_whole else ItemSplit)(source, torch.as_tensor(own), torch.from_numpy(of))
        for source, own, of in zip(sources, indices, classes, strict=True)
    ]
    return parts[0] if shape is None else CombinedSplit(parts, shape)
