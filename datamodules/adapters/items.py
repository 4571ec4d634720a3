"""Splits and batches of a user-defined data set: items of any kind, read and collated when a batch is needed."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from pfl_lightning.data import TwoViews
from pfl_lightning.datamodules.adapters.sources import BatchSizes, ItemSource, OwnItems
from pfl_lightning.datamodules.adapters.stages import for_another_process
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.base import Partitioner
from pfl_lightning.options import DataOptions, Unpack


class ItemSplit:
    """One client's training, validation or test items.

    Args:
        source: The data set.
        indices: Items of this split, shape (n,), int64.
        classes: Class of every item of the data set, shape (N,), int64.

    Attributes:
        datamodule: Data module whose batch hooks an inner Trainer calls; None for no hooks.

    Example:
        >>> from torch.utils.data import default_collate
        >>> from pfl_lightning.datamodules.adapters.sources import ItemSource
        >>> source = ItemSource([{"x": 0.0}, {"x": 1.0}, {"x": 2.0}], default_collate)
        >>> split = ItemSplit(source, torch.tensor([0, 2]), classes=torch.tensor([0, 0, 1]))
        >>> [batch["x"].tolist() for batch in split.loader(batch_size=2)]
        [[0.0, 2.0]]
        >>> split.class_counts(num_classes=2).tolist()
        [1, 1]
    """

    def __init__(self, source: ItemSource, indices: Tensor, classes: Tensor) -> None:
        self.source, self.indices, self._classes = source, indices, classes
        self.datamodule = source.datamodule

    def __len__(self) -> int:
        return len(self.indices)

    def split(self, size: int) -> Iterator[ItemSplit]:
        """Consecutive pieces of at most ``size`` items."""
        for indices in self.indices.split(size):
            piece = copy.copy(self)
            piece.indices = indices
            yield piece

    def class_counts(self, num_classes: int) -> Tensor:
        """Number of items of each class, shape (C,)."""
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
        """Loader of batches of this split, see :meth:`ClientSplit.loader`.

        Args:
            batch_size: Items in a batch, at least 1.
            device: Device of the batches.
            generator: CPU generator of the order.
            shuffle: Whether every epoch has a new random order, if the user's loader shuffles too.
            drop_last: Whether an incomplete last batch is dropped.
            augment: Not used: augmentation is the data set's own.
            views: 1, or 2 for batches that are :class:`~pfl_lightning.data.TwoViews`: every item is read twice, so that
                random transforms of the data set make two views of it.

        Raises:
            ValueError: If more views are asked for, or no batch would be left.
        """
        if views not in (1, 2):
            raise ValueError(
                f"a user-defined data set gives at most two views of each item, the method needs {views} augmented "
                "views: use FromDatasets with augment"
            )
        if drop_last and batch_size > len(self):
            raise ValueError(
                f"drop_last leaves no batch: batch_size is {batch_size}, the split has {len(self)} items; lower "
                f"batch_size to at most {len(self)}, set drop_last=False, or give clients more items"
            )
        order = generator if shuffle and self.source.shuffled else None
        draws = generator if views == 2 or (shuffle and self.source.workers is not None) else order
        split = copy.copy(self)
        if not (shuffle or self.source.evaluated):  # a pass over all training items, as for statistics that are sent
            split.source = replace(self.source, order=None)
        size = self._size(batch_size, shuffle)
        return ItemLoader(split, size, torch.device(device), order, drop_last, draws, views)

    def _size(self, asked: int, shuffle: bool) -> int:
        """Items in a batch: an evaluation has the loader's own number, and where an item is a batch there is one."""
        if self.source.by == "item":
            return 1
        return self.source.batches.eval_batch_size if self.source.evaluated and not shuffle else asked


def own_items(split: ItemSplit) -> Any:
    """The data set that a loader of a split has: the whole one, if the split is all of it or nobody knows."""
    whole = split.source.dataset
    if isinstance(whole, IterableDataset) or not hasattr(whole, "__len__") or len(split) == len(whole):
        return whole
    if type(whole) is Subset:  # of random_split: what it is a part of has the attributes that a step may ask for
        return OwnItems(whole.dataset, [whole.indices[place] for place in split.indices.tolist()])
    return OwnItems(whole, split.indices.tolist())


class LoaderEpoch:
    """What a Trainer tells the sampler of a loader's batch sampler: its epoch.

    Attributes:
        told: The epoch; ``None`` if nobody counts them.
        before: Epochs that came before the Trainer's first, which begins at 0 in every local fit.
    """

    told: int | None = None
    before = 0

    @property
    def sampler(self) -> LoaderEpoch:
        """Where a Trainer looks."""
        return self

    @property
    def epoch(self) -> int | None:
        """The epoch of the next pass."""
        return None if self.told is None else self.told + self.before

    def set_epoch(self, epoch: int) -> None:
        """Keep the number for the next pass."""
        self.told = epoch


def no_tensors(self: Any, *_: Any) -> NoReturn:
    """Refuse, since items may have any shape.

    Raises:
        TypeError: Always.
    """
    raise TypeError(
        "a user-defined data set is read batch by batch and has no tensor of all inputs: use FromDatasets for a method "
        "that computes features once"
    )


class ItemLoader:
    """Batches of one split, read and collated at every pass.

    Args:
        split: The items.
        batch_size: Items in a batch.
        device: Device of the batches.
        generator: CPU generator of a new order for every pass; ``None`` keeps the order of the split.
        drop_last: Whether an incomplete last batch is dropped.
        draws: Seeds the readings, in each pass, round and client by others; ``None`` where they are not seeded.
        views: 1, or 2 for two readings of each item.

    Attributes:
        augmented: Always true, since the data set may transform its items at random at every pass.
    """

    augmented = True

    def __init__(
        self,
        split: ItemSplit,
        batch_size: int,
        device: torch.device,
        generator: torch.Generator | None,
        drop_last: bool,
        draws: torch.Generator | None = None,
        views: int = 1,
    ) -> None:
        self.batch_size, self.views = batch_size, views
        self.dataset = own_items(split)
        self._split, self._device, self._generator, self._drop_last = split, device, generator, drop_last
        self._draws = draws
        self.batch_sampler = LoaderEpoch()  # to which a Trainer tells its epoch; a sampler would be examined

    def __len__(self) -> int:
        """Number of batches.

        Raises:
            TypeError: Every pass has another number, by the user's sampler.
        """
        order = self._split.source.order
        count = len(self._split) if order is None else order.count(len(self._split))
        if count is None:
            raise TypeError("the sampler gives a different number of batches in every pass")
        full, rest = divmod(count, self.batch_size)
        return full + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        read, places = self._split.source.read, self._places()
        if self._generator is None and self._draws is not None:
            torch.empty((), dtype=torch.int64).random_(generator=self._draws)  # no order was drawn: as another pass
        if self.views == 1:
            for batch in read(places, self._draws):
                yield move_data_to_device(batch, self._device)
            return
        readings = read([own for own in places for _ in range(2)], self._draws, seeded=True)
        for views in zip(readings, readings, strict=True):
            yield move_data_to_device(TwoViews(*views), self._device)

    def _places(self) -> list[list[int]]:
        """Places of the items of each batch of one pass."""
        indices, generator, order = self._split.indices, self._generator, self._split.source.order
        if order is not None:
            # An evaluation has no generator: its draws are the same at every pass.
            epoch = 0 if generator is None else self.batch_sampler.epoch
            return order.batches(indices, self.batch_size, self._drop_last, generator or torch.Generator(), epoch)
        if generator is not None:
            indices = indices[torch.randperm(len(indices), generator=generator)]
        return [places.tolist() for places in indices.split(self.batch_size)[: len(self)]]

    tensors = with_inputs = no_tensors


@dataclass(frozen=True)
class ClientItems:
    """Splits of one client.

    Attributes:
        train: Training items.
        validation: Validation items; may be empty.
        test: Test items; may be empty.
        batches: The client's own settings of batches; ``None`` for those of the data module, which hold for all.
    """

    train: ItemSplit
    validation: ItemSplit
    test: ItemSplit
    batches: BatchSizes | None = None

    @property
    def train_and_unlabeled(self) -> ItemSplit:
        """Training items, which are all there are."""
        return self.train


class ItemDataModule(FederatedDataModule):
    """Base of the data modules whose samples are items of a user-defined data set.

    Args:
        partition: Rule that assigns the items to clients.
        given: The data modules that have the items.
        args: See :class:`FederatedDataModule`.
        kwargs: See :class:`FederatedDataModule`.
    """

    _labeled: bool

    def __init__(
        self, partition: Partitioner, given: Sequence[LightningDataModule], /, *args: int, **kwargs: Unpack[DataOptions]
    ) -> None:
        super().__init__(partition, *args, **kwargs)
        self._owners = list(given)

    def __getattr__(self, name: str) -> Any:
        """Attribute of the first data module, such as its vocabulary."""
        own = self.__dict__.get("_owners")
        if not own or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(own[0], name)

    def __getstate__(self) -> dict[str, Any]:
        """State without Trainers."""
        owners = [for_another_process(own, self._ready is not None) for own in self._owners]
        return {**super().__getstate__(), "_owners": owners}

    def prepare_data(self) -> None:
        """Prepare the data modules."""
        for own in self._owners:
            own.prepare_data()

    @abstractmethod
    def sources(self) -> Iterator[ItemSource]:
        """The data sets with their loaders' settings."""

    @property
    def divided_datasets(self) -> list[Any]:
        """The Datasets that are divided, each once for each of its sources."""
        found = (source.dataset for source in self.sources())
        return [dataset.dataset if isinstance(dataset, OwnItems) else dataset for dataset in found]

    def release(self) -> None:
        """End the processes that read items; they are started again when they are needed."""
        for source in self.sources():
            for owner in (source.workers, source.loader):
                if owner is not None:
                    owner.close()

    def teardown(self, stage: str) -> None:
        """End the processes that read items."""
        self.release()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Refuse, since items may have any shape.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{type(self).__name__} has items of any kind, without a known shape: an encoder needs FromLightning or "
            "FromDatasets"
        )

    @property
    def num_classes(self) -> int:
        """Number of classes C; 0 if items have no class, or it is not known without reading them."""
        return len(self.class_names) if self._labeled else 0
