"""Who reads the items behind a user's loaders: worker processes that all clients share, or a client's own loader."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size
from torch.utils.data import DataLoader, Dataset, get_worker_info

from pfl_lightning.datamodules.adapters.samplers import tell_epoch

Values = list[dict[str, Any]]
"""Plain attributes of each of some data sets, by name."""

Task = tuple[list[int], int, Values | None]
"""Places of the items of a batch, the seed of what their transforms draw, and what the data set's attributes are."""

By = Literal["items", "list", "item"]

SETTINGS = ("num_workers", "pin_memory", "timeout", "prefetch_factor", "pin_memory_device")

SMALL = 100
"""Values in a container that still counts as plain: a list of all classes or files is content, and no state."""


@dataclass(frozen=True)
class Fetch:
    """Reads a batch of a data set, as a DataLoader does.

    Attributes:
        dataset: Map-style data set.
        collate: The loader's function from items to a batch.
        by: What the data set is asked for: its items one by one, a list of them, or a single item, which is a batch.

    Example:
        >>> Fetch([1, 2, 3], sum)([0, 2])
        4
    """

    dataset: Any
    collate: Callable[[Any], Any]
    by: By = "items"

    def __call__(self, places: list[int]) -> Any:
        """Collated batch of the items at the given places."""
        if self.by != "items":
            return self.collate(self.dataset[places if self.by == "list" else places[0]])
        if hasattr(self.dataset, "__getitems__"):
            return self.collate(self.dataset.__getitems__(places))
        return self.collate([self.dataset[place] for place in places])


class Workers:
    """Worker processes with the settings of a user's loader, kept from pass to pass, client to client, round to round.

    They are started when the first batch is asked for, and read what they are told: places of items. What the data
    set's transforms draw (from torch, Python or NumPy) is seeded for every batch, so that it does not depend on what a
    worker has read before. Plain attributes that the data set has when a pass begins (the level of a curriculum) are
    told to them.

    Args:
        loader: The user's loader, whose ``num_workers``, ``worker_init_fn``, ``pin_memory``, ``prefetch_factor``,
            ``timeout`` and ``multiprocessing_context`` hold.
        fetch: Reads a batch.
        turns: Lets one of several such objects have processes at a time; ``None`` for no such limit.
    """

    def __init__(self, loader: DataLoader[Any], fetch: Fetch, turns: OneAtATime | None = None) -> None:
        self._settings = {name: getattr(loader, name) for name in SETTINGS if hasattr(loader, name)}
        context = loader.multiprocessing_context
        method = getattr(context, "get_start_method", None)
        self._settings["multiprocessing_context"] = method() if method is not None else context
        self._init, self._turns = loader.worker_init_fn, turns
        self._reader = _Reader(fetch)
        self._loader: DataLoader[Any] | None = None
        self._in_use = False
        self._at_start: Values | None = None  # plain attributes with which the processes were started
        self._changes = False

    def __getstate__(self) -> dict[str, Any]:
        """State without processes."""
        return {**self.__dict__, "_loader": None, "_in_use": False, "_at_start": None, "_changes": False}

    def read(self, batches: Sequence[list[int]], generator: torch.Generator | None) -> Iterator[Any]:
        """Batches in their order.

        Args:
            batches: Places of the items of each batch.
            generator: Its state, which stays as it is, gives the seeds of what transforms draw.
        """
        if not batches:
            return
        if self._turns is not None:
            self._turns.give_to(self)
        values = plain_values(list(nested_datasets(self._reader.fetch.dataset)))
        self._at_start = values if self._at_start is None else self._at_start
        self._changes = self._changes or values != self._at_start
        told = values if self._changes else None
        tasks = [(places, seed, told) for places, seed in _tasks(batches, generator)]
        shared = not self._in_use  # else a pass within a pass: it gets processes of its own
        if shared and self._loader is None:
            self._loader = self._make(persistent=True)
        loader = self._loader if shared else self._make(persistent=False)
        assert loader is not None
        self._in_use = True
        left = len(tasks)
        try:
            loader.sampler[:] = tasks  # type: ignore[index]
            batches_read = iter(loader)
            while left:
                batch = next(batches_read)
                left -= 1
                if not left and shared:
                    self._in_use = False  # nothing is asked of it any more, even if this function is not resumed
                yield batch
        finally:
            if left and shared:
                self._in_use = False

    def close(self) -> None:
        """End the processes."""
        loader, self._loader = self._loader, None
        self._in_use, self._at_start, self._changes = False, None, False
        if loader is not None:
            end_workers(loader)

    def _make(self, persistent: bool) -> DataLoader[Any]:
        return DataLoader(
            self._reader,
            batch_size=None,
            sampler=[],  # filled for each pass
            collate_fn=_as_it_is,
            worker_init_fn=partial(_start, self._init),
            persistent_workers=persistent,
            generator=torch.Generator(),  # or it would draw from torch's own, on which local fits depend
            **self._settings,
        )


class OneAtATime:
    """Lets one of several owners of processes have them at a time.

    With a loader for each client, the processes of all clients would be as many as there are clients, times
    ``num_workers``.
    """

    def __init__(self) -> None:
        self._owner: Any = None

    def give_to(self, owner: Any) -> None:
        """End the processes of whoever had them before."""
        if self._owner is not None and self._owner is not owner:
            self._owner.close()
        self._owner = owner

    def __getstate__(self) -> dict[str, Any]:
        """State without an owner."""
        return {"_owner": None}


def end_workers(loader: DataLoader[Any]) -> None:
    """End the processes that a loader has kept."""
    iterator, loader._iterator = loader._iterator, None
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


class _Reader(Dataset[Any]):
    """A data set of batches."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch

    def __getitem__(self, task: Task) -> Any:
        places, seed, values = task
        if values is not None:
            set_values(list(nested_datasets(self.fetch.dataset)), values)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  (transforms draw from it)
        return self.fetch(places)


def _start(init: Callable[[int], None] | None, worker: int) -> None:
    """Tell a worker that its data set is the user's, and call the user's function."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, _Reader):
        object.__setattr__(info, "dataset", info.dataset.fetch.dataset)  # the process's own copy
    if init is not None:
        init(worker)


def _as_it_is(batch: Any) -> Any:
    return batch


def _tasks(batches: Sequence[list[int]], generator: torch.Generator | None) -> list[tuple[list[int], int]]:
    """Places of the items of each batch with its seed: from a number that the generator would give next."""
    first = 0 if generator is None else int(torch.randint(2**32, (), generator=generator.clone_state()))
    return [(places, (first + number) % 2**32) for number, places in enumerate(batches)]


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
            count += size_of(batch)
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


def size_of(batch: Any) -> int:
    """Number of items in a batch; 1 for an object that shows no tensors."""
    try:
        return int(extract_batch_size(batch))
    except (RuntimeError, MisconfigurationException):
        return 1


def nested_datasets(dataset: Any) -> Iterator[Any]:
    """A data set and those that it wraps (``Subset``, ``ConcatDataset`` and the user's own), each once."""
    seen, waiting = set[int](), [dataset]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or not hasattr(one, "__dict__"):
            continue
        seen.add(id(one))
        yield one
        for value in vars(one).values():
            inside = value if isinstance(value, list | tuple) else [value]
            waiting += [each for each in inside[:SMALL] if isinstance(each, Dataset)]


def plain_values(datasets: Sequence[Any]) -> Values:
    """Numbers, strings and small containers of them among the attributes, copied.

    Example:
        >>> class Curriculum:
        ...     level = 0
        >>> items = Curriculum()
        >>> items.level, items.files = 3, ["a.png"] * 1000
        >>> plain_values([items])
        [{'level': 3}]
        >>> set_values([items], [{"level": 1}])
        >>> items.level
        1
    """
    return [{name: copy.deepcopy(v) for name, v in vars(one).items() if _is_plain(v)} for one in datasets]


def set_values(datasets: Sequence[Any], values: Values) -> None:
    """Set what :func:`plain_values` returned; what has become something else since (an opened file) stays."""
    for one, own in zip(datasets, values, strict=True):
        held = vars(one)
        for name in [name for name, value in held.items() if _is_plain(value)]:
            if name in own:
                held[name] = held[name] if held[name] == own[name] else copy.deepcopy(own[name])
            elif not isinstance(getattr(type(one), name, None), cached_property):
                del held[name]
        held.update({name: copy.deepcopy(value) for name, value in own.items() if name not in held})


def _is_plain(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if type(value) is dict:
        return len(value) <= SMALL and all(_is_plain(each) for pair in value.items() for each in pair)
    return type(value) in (list, tuple) and len(value) <= SMALL and all(map(_is_plain, value))


def iterates_by_itself(loader: DataLoader[Any]) -> bool:
    """Whether the class of a loader has a pass of its own, which may change batches."""
    own = type(loader)
    return own.__iter__ is not DataLoader.__iter__ or own._get_iterator is not DataLoader._get_iterator
