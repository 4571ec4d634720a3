"""Items of a user's loader: which they are, of which classes, in which order they come, who reads them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pfl_lightning.data import checked_length
from pfl_lightning.datamodules.adapters.item_source import (
    BatchSizes,
    By,
    Fetch,
    ItemSource,
    OneAtATime,
    OwnItems,
    Workers,
)
from pfl_lightning.datamodules.adapters.labels import classes_of, known_names
from pfl_lightning.datamodules.adapters.loading.orders import (
    Order,
    SampledOrder,
    afresh,
    ending,
    order_of,
    seeded_draws,
)
from pfl_lightning.datamodules.adapters.loading.streams import Kept, iterates_by_itself
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError


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
    order: Order | None = None
    whole: Any = loader.dataset
    if plan.batch_size is None:
        order = SampledOrder(plan.sampler, len(whole), places, batched=True)
    elif not (isinstance(whole, IterableDataset) or gives_each_once(plan.sampler)):
        order = order_of(plan.sampler, len(whole), places)
    shuffled = order is not None or not isinstance(plan.sampler, (SequentialSampler, *LISTS))
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
    return places_of(_plan(loader).sampler, len(whole) if hasattr(whole, "__len__") else None)


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
    if type(loader.sampler) is SubsetRandomSampler:
        return True
    return type(loader.sampler) in WHOLE and gives_each_once(loader.sampler) and selection_of(loader) is None


def check_sampler(loader: DataLoader[Any], name: str) -> None:
    """Refuse a sampler of something else than numbers of items, of which each is of one client.

    A loader whose class has a pass of its own gets a warning, as items are read without it.

    Raises:
        TypeError: Names the loader by its hook.
    """
    if iterates_by_itself(loader):
        warnings.warn(
            f"{name}: {type(loader).__name__} has an __iter__ of its own, which is not called where its items are "
            "divided among clients, so that nothing it does to batches is done; let the Dataset or collate_fn do it, "
            "or give a list of loaders, one a client, each used as it is",
            stacklevel=2,
        )
    plan = _plan(loader)
    if type(plan.sampler) in WHOLE:
        return
    first = _first(plan.sampler)
    if plan.batch_size is None and isinstance(first, Iterable):
        first = next(iter(first), None)
    if first is not None and not hasattr(first, "__index__"):
        raise TypeError(
            f"{name} has a {type(plan.sampler).__name__}, which gives {type(first).__name__}s in the place of numbers "
            "of items: give the DataLoader a batch_size and a sampler of numbers, or a list of loaders, one a client, "
            "each used as it is"
        )
    if plan.batch_size is None:
        warnings.warn(
            f"{name}: of each batch of the {type(plan.sampler).__name__} a client gets its own items, so that its "
            "batches are smaller; a list of loaders, one a client, uses each as it is",
            stacklevel=2,
        )


LISTS = (list, tuple, range, Tensor, np.ndarray)
"""What a DataLoader takes for a sampler beside samplers."""

WHOLE = (RandomSampler, SequentialSampler)
"""Samplers of all items of a collection."""

Sources = Mapping[str, Sequence[ItemSource]]
"""The data sets of each stage."""

FEW = 1000
"""Items of a data set of which random passes may be the same by chance."""

EPOCHS = (0, 1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
"""Epochs that are looked at: a curriculum adds items later."""


def gives_each_once(sampler: Any) -> bool:
    """Whether a sampler of torch, or a list, gives each of its items once, in order or shuffled.

    Example:
        >>> gives_each_once([4, 2]), gives_each_once([4, 4]), gives_each_once(SequentialSampler(range(3)))
        (True, False, True)
    """
    if isinstance(sampler, LISTS):
        return len({int(place) for place in sampler if _is_place(place)}) == len(sampler)  # of numbers, not of lists
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler._num_samples is None
    return type(sampler) is SequentialSampler or _is_subset(sampler)


def places_of(sampler: Any, length: int | None) -> list[int] | None:
    """Places of the items that a sampler, or a batch sampler, can give; ``None`` where it can give all.

    A sampler of the user's is asked: its places are a selection if several passes give the same ones.

    Args:
        sampler: What gives places, or lists of them.
        length: Number of items of the data set; ``None`` where that is not known.

    Example:
        >>> places_of([[3, 1], [1, 2]], 5), places_of(WeightedRandomSampler([0.0, 1.0, 2.0], 9), 3)
        ([1, 2, 3], [1, 2])
        >>> places_of([4, 2], 5), places_of(RandomSampler(range(5), num_samples=2), 5) is None
        ([4, 2], True)
    """
    if _is_subset(sampler) or (isinstance(sampler, LISTS) and gives_each_once(sampler)):
        return [int(place) for place in (sampler.indices if _is_subset(sampler) else sampler)]
    if length is None:
        return None
    if type(sampler) in WHOLE:  # of another collection, with fewer than there are items
        source = sampler.data_source
        return list(range(len(source))) if hasattr(source, "__len__") and len(source) < length else None
    if type(sampler) is WeightedRandomSampler:
        found = {place for place, weight in enumerate(torch.as_tensor(sampler.weights).tolist()) if weight > 0}
    else:
        passes = _passes(sampler, length)
        if not passes or any(each != passes[0] for each in passes):
            return None
        found = passes[0]
    return sorted(found) if found and len(found) < length and max(found) < length and min(found) >= 0 else None


def _is_subset(sampler: Any) -> bool:
    return isinstance(sampler, SubsetRandomSampler) and type(sampler).__iter__ is SubsetRandomSampler.__iter__


def _passes(sampler: Any, length: int) -> list[set[int]]:
    """Places in several passes, each of a copy of the sampler; empty where it cannot be copied, or read to an end."""
    found = []
    for epoch in EPOCHS if length <= FEW or callable(getattr(sampler, "set_epoch", None)) else EPOCHS[:2]:
        own = copy.deepcopy(sampler) if isinstance(sampler, LISTS) else afresh(sampler)
        if own is sampler and not isinstance(sampler, LISTS):
            return []
        try:
            with seeded_draws(torch.Generator().manual_seed(epoch), own, epoch):
                found.append(_flat(ending(own, length)))
        except Exception:  # of the user's code; without an end, or no numbers: said where its items are read
            return []
    return found


def _flat(given: Iterable[Any]) -> set[int]:
    found: set[int] = set()
    for one in given:
        found.update(map(int, one if isinstance(one, LISTS) and not _is_place(one) else [one]))
    return found


def _is_place(value: Any) -> bool:
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


@dataclass(frozen=True)
class LoaderClasses:
    """Classes of the items of all loaders.

    Attributes:
        are_known: Whether items have classes.
        names: Their names; one where there are none.
        by_stage: The class of every item of each data set of a stage; 0 where there are none.
    """

    are_known: bool
    names: tuple[str, ...]
    by_stage: dict[str, list[Ints]]


def find_classes(
    sources: Sources,
    partition: Partitioner,
    labels: Callable[[Any], Any] | None,
    class_names: Sequence[str] | None,
) -> LoaderClasses:
    """The classes of all items; no item is read for them unless the rule needs them.

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
            names = known_names(class_names, sources["train"][0].dataset, known, said)
    elif partition.needs_labels:
        without = next(name for name in sets if name not in known)
        raise PartitionError(
            f"{type(partition).__name__} needs classes, and the items of the {without} have none that is a "
            "whole number: pairs (input, class), a data set with targets, or labels=function of an item, such as "
            "the first of several labels. For a regression use IID, or Quantity on top of it"
        )
    return LoaderClasses(names is not None, names or ("0",), filled(sources, found, names is not None))


def one_class(source: ItemSource) -> Ints:
    """The class 0 for every item, where items have none; of a stream of unknown length for one item."""
    if isinstance(source.dataset, IterableDataset) and not hasattr(source.dataset, "__len__"):
        return np.zeros(1, dtype=np.int64)
    return np.zeros(checked_length(source.dataset, "data set"), dtype=np.int64)


def filled(sources: Sources, found: Mapping[str, Sequence[Ints | None]], are_known: bool) -> dict[str, list[Ints]]:
    """The class of every item of each data set of a stage; 0 where it has none, or none are known."""
    return {
        name: [
            classes if are_known and classes is not None else one_class(source)
            for source, classes in zip(own, found[name], strict=True)
        ]
        for name, own in sources.items()
    }
