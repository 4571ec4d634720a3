"""Items of a user's loader: which they are, of which classes, in which order they come, who reads them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset, SubsetRandomSampler

from pfl_lightning.data import checked_length
from pfl_lightning.datamodules.adapters import samplers
from pfl_lightning.datamodules.adapters.labels import classes_of, names_of_classes
from pfl_lightning.datamodules.adapters.workers import By, Fetch, Kept, OneAtATime, Workers, _tasks, iterates_by_itself
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError
from pfl_lightning.seeding import python_seed


@dataclass(frozen=True)
class BatchSizes:
    """Settings of one client's loaders, where clients differ in them.

    Attributes:
        batch_size: Items in a training batch.
        eval_batch_size: Items in a validation or test batch.
        drop_last: Whether an incomplete last training batch is dropped.
    """

    batch_size: int
    eval_batch_size: int
    drop_last: bool


class OwnItems(Subset[Any]):
    """The items of one client, with the attributes of the whole data set: what a step may ask a loader's for."""

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # while it is copied or unpickled
            raise AttributeError(name)
        found = getattr(self.dataset, name)
        if name != "targets" or not hasattr(found, "__len__") or len(found) != len(self.dataset):  # type: ignore[arg-type]
            return found
        if hasattr(found, "iloc"):  # pandas would look numbers up in its index
            return found.iloc[list(self.indices)]
        return found[self.indices] if isinstance(found, Tensor | np.ndarray) else [found[one] for one in self.indices]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the data set, from which the items are read."""
        if name in ("dataset", "indices"):
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)


@dataclass(frozen=True)
class ItemSource:
    """Map-style data set with the collate function and order of its loader.

    Attributes:
        dataset: Map-style data set.
        collate: Function from a list of items to a batch.
        shuffled: True if training batches have a new random order every epoch.
        datamodule: Data module whose batch hooks an inner Trainer calls; None for no hooks.
        order: Order of a sampler or batch sampler of the user's; None for a plain one.
        workers: Processes that read the items; None to read them in this process.
        batches: Sizes of its loader's batches, for where several are combined.
        evaluated: Whether it is for evaluations alone, which have the sizes of its own loader.
        loader: The client's own loader, where it is used as it is; None where the items are read by their places.
        by: What the data set is asked for, see :class:`~pfl_lightning.datamodules.adapters.workers.Fetch`.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    shuffled: bool = True
    datamodule: LightningDataModule | None = None
    order: samplers.Order | None = None
    workers: Workers | None = None
    batches: BatchSizes = BatchSizes(1, 1, False)
    evaluated: bool = False
    loader: Any = None
    by: By = "items"

    @property
    def is_read_whole(self) -> bool:
        """Whether items come from a loader or stream of the client's as it is, in which they have no numbers."""
        return self.loader is not None or isinstance(self.dataset, IterableDataset)

    def read(
        self, batches: Sequence[list[int]], generator: torch.Generator | None, seeded: bool = False
    ) -> Iterator[Any]:
        """Collated batches of the items at the given places.

        Args:
            batches: Places of the items of each batch.
            generator: Its state gives the seeds of what transforms draw, where they are seeded for each batch.
            seeded: Whether they are in this process, too, for draws from Python and NumPy; in workers they always are.
        """
        if self.workers is not None:
            yield from self.workers.read(batches, generator)
            return
        fetch = Fetch(self.dataset, self.collate, self.by)
        for places, seed in _tasks(batches, generator):  # draws from torch go on from those before: they are the fit's
            with python_seed(seed) if seeded else nullcontext():
                batch = fetch(places)
            yield batch


Sources = Mapping[str, Sequence[ItemSource]]
"""The data sets of each stage."""


def source_of(
    loader: DataLoader[Any], datamodule: LightningDataModule, stage: str, turns: OneAtATime | None = None
) -> ItemSource:
    """Items of a loader with its collate function, its order and its workers.

    Args:
        loader: The loader.
        datamodule: The data module that it is of, whose hooks go with the batches.
        stage: ``"train"``, ``"validation"`` or ``"test"``.
        turns: For the loader of a single client, which is used as it is where its batches are not those of a plain
            loader: lets one client at a time have workers.
    """
    hooks = datamodule if getattr(datamodule, "has_hooks", True) else None
    plan, places = _plan(loader), selection_of(loader)
    dataset = loader.dataset if places is None else OwnItems(loader.dataset, places)
    if turns is not None and not _is_plain(loader):
        own = BatchSizes(int(loader.batch_size or 1), int(loader.batch_size or 1), False)
        kept = Kept(loader, turns)
        return ItemSource(dataset, loader.collate_fn, True, hooks, None, None, own, stage != "train", kept, plan.by)
    order: samplers.Order | None = None
    whole: Any = loader.dataset
    if plan.batch_size is None:
        order = samplers.SampledOrder(plan.sampler, len(whole), places, batched=True)
    elif not (isinstance(whole, IterableDataset) or samplers.gives_each_once(plan.sampler)):
        order = samplers.order_of(plan.sampler, len(whole), places)
    shuffled = order is not None or not isinstance(plan.sampler, (SequentialSampler, *samplers.LISTS))
    fetch = Fetch(dataset, loader.collate_fn, plan.by)
    workers = Workers(loader, fetch, turns) if loader.num_workers else None
    sizes = BatchSizes(plan.batch_size or 1, plan.batch_size or 1, plan.drop_last)
    return ItemSource(dataset, loader.collate_fn, shuffled, hooks, order, workers, sizes, stage != "train", by=plan.by)


@dataclass(frozen=True)
class _Plan:
    """How a loader makes batches.

    Attributes:
        sampler: Gives places of items; of lists of them where there is no batch size.
        batch_size: Items in a batch.
        drop_last: Whether an incomplete last batch is dropped.
        by: What the data set is asked for.
    """

    sampler: Any
    batch_size: int | None
    drop_last: bool
    by: By = "items"


def _plan(loader: DataLoader[Any]) -> _Plan:
    if loader.batch_size is not None:
        return _Plan(loader.sampler, int(loader.batch_size), bool(loader.drop_last))
    by: By = "items" if loader.batch_sampler is not None else "list"
    given: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(given) is BatchSampler:  # as a plain loader makes it
        return _Plan(given.sampler, given.batch_size, given.drop_last, by)
    if by == "list" and not isinstance(_first(given), list | tuple):  # without batches: the data set gives them
        return _Plan(given, 1, False, "item")
    return _Plan(given, None, False, by)


def selection_of(loader: DataLoader[Any]) -> list[int] | None:
    """Places of the items that a loader's sampler, or batch sampler, selects; ``None`` where it can give all.

    Args:
        loader: A loader.
    """
    whole: Any = loader.dataset
    if isinstance(whole, IterableDataset):
        return None
    return samplers.places_of(_plan(loader).sampler, len(whole) if hasattr(whole, "__len__") else None)


def _first(sampler: Any) -> Any:
    """The first that a sampler gives, without a trace in generators."""
    with isolate_rng(include_cuda=False):
        return next(iter(sampler), None)


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether the package may read a loader's items itself: in batches of a number, in order or shuffled."""
    if iterates_by_itself(loader) or loader.batch_size is None:
        return False
    if isinstance(loader.dataset, IterableDataset):
        return not loader.num_workers and hasattr(loader.dataset, "__len__")
    own = loader.sampler
    if type(own) is SubsetRandomSampler:
        return True
    return type(own) in samplers.WHOLE and samplers.gives_each_once(own) and selection_of(loader) is None


def check_sampler(loader: DataLoader[Any], name: str) -> None:
    """Refuse a sampler of something else than numbers of items, of which each is of one client.

    A loader whose class has a pass of its own gets a warning, as items are read without it.

    Raises:
        TypeError: Names the loader by its hook.
    """
    if iterates_by_itself(loader):
        warnings.warn(
            f"{name}: {type(loader).__name__} has its own __iter__, which is not called when its items are divided "
            "among clients: its changes to batches are lost. Make them in the Dataset or collate_fn, or pass a "
            "list of loaders, one for each client; each is used as it is",
            stacklevel=2,
        )
    plan = _plan(loader)
    if type(plan.sampler) in samplers.WHOLE:
        return
    first = _first(plan.sampler)
    if plan.batch_size is None and isinstance(first, Iterable):
        first = next(iter(first), None)
    if first is not None and not hasattr(first, "__index__"):
        raise TypeError(
            f"{name} has a {type(plan.sampler).__name__}, which gives {type(first).__name__}s instead of item indices: "
            "use a DataLoader with a batch_size and a sampler of indices, or pass a list of loaders, one for each "
            "client; each is used as it is"
        )
    if plan.batch_size is None:
        warnings.warn(
            f"{name}: from each batch of the {type(plan.sampler).__name__} a client gets only its own items, so its "
            "batches are smaller; a list of loaders, one for each client, uses each as it is",
            stacklevel=2,
        )


def find_classes(
    sources: Sources, partition: Partitioner, labels: Callable[[Any], Any] | None, class_names: Sequence[str] | None
) -> tuple[tuple[str, ...] | None, dict[str, list[Ints]]]:
    """Names of the classes, if items have some, and the class of every item of each data set of a stage.

    No item is read for them unless the rule needs them.

    Args:
        sources: The data sets of each stage.
        partition: The rule.
        labels: See :class:`~pfl_lightning.datamodules.FromLoaders`.
        class_names: See :class:`~pfl_lightning.datamodules.FromLoaders`.

    Raises:
        PartitionError: The rule needs classes, and items have none.
        ValueError: Whole numbers that were said to be classes cannot be.
    """
    # A file's rule has the class proportions of the rule that it was written by.
    read = partition.needs_labels or partition.fixed_train
    found = {name: [classes_of(each.dataset, labels, read=read) for each in own] for name, own in sources.items()}
    sets = {f"{name} set" + (f" {n}" if n else ""): one for name, own in found.items() for n, one in enumerate(own)}
    known = {name: classes for name, classes in sets.items() if classes is not None}
    names: tuple[str, ...] | None = None
    if len(known) == len(sets):
        said = partition.needs_labels or labels is not None or class_names is not None
        # Numbers of persons, files or prices, most of them there once: a client's have no item in a test set.
        number, items = len(np.unique(known["train set"])), len(known["train set"])
        alone = list(sources) == ["train"] and number == items
        if said or read or not (alone or (items >= 100 and 2 * number > items)):
            ignored: tuple[type[Exception], ...] = () if said else (ValueError,)
            with suppress(*ignored):  # whole numbers that cannot be classes are none
                names = names_of_classes(class_names, sources["train"][0].dataset, known)
    elif partition.needs_labels:
        without = next(name for name in sets if name not in known)
        raise PartitionError(
            f"{type(partition).__name__} needs classes, and the items of the {without} have no class that is "
            "a whole number: give pairs (input, class), a data set with targets, or labels=function of an item, such "
            "as the first of several labels. For regression use IID, or Quantity on top of it"
        )
    return names, filled(sources, found, names is not None)


def filled(sources: Sources, found: Mapping[str, Sequence[Ints | None]], are_known: bool) -> dict[str, list[Ints]]:
    """The class of every item of each data set of a stage; 0 where it has none, or none are known."""

    def classes_of_all(source: ItemSource, classes: Ints | None) -> Ints:
        if are_known and classes is not None:
            return classes
        unknown = isinstance(source.dataset, IterableDataset) and not hasattr(source.dataset, "__len__")
        return np.zeros(1 if unknown else checked_length(source.dataset, "data set"), dtype=np.int64)

    return {name: list(map(classes_of_all, own, found[name])) for name, own in sources.items()}


def evaluation_size(sources: Sources) -> int:
    """Items in a batch of evaluations, by the loader of the first stage that has one."""
    return sources.get("validation", sources.get("test", sources["train"]))[0].batches.eval_batch_size
