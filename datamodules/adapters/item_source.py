"""Items behind a user's DataLoader, and the worker processes that read those of all clients in turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from pfl_lightning.datamodules.adapters.loading.orders import Order
from pfl_lightning.datamodules.adapters.loading.plain_values import Values, nested_datasets, plain_values, set_values
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
        by: What the data set is asked for, see :class:`~pfl_lightning.datamodules.adapters.item_source.Fetch`.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    shuffled: bool = True
    datamodule: LightningDataModule | None = None
    order: Order | None = None
    workers: Workers | None = None
    batches: BatchSizes = BatchSizes(1, 1, False)
    evaluated: bool = False
    loader: Any = None
    by: By = "items"

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


Task = tuple[list[int], int, Values | None]
"""Places of the items of a batch, the seed of what their transforms draw, and what the data set's attributes are."""

By = Literal["items", "list", "item"]

SETTINGS = ("num_workers", "pin_memory", "timeout", "prefetch_factor", "pin_memory_device")


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
            loader.sampler.tasks = tasks  # type: ignore[attr-defined]
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
            sampler=_Tasks(),
            collate_fn=_as_it_is,
            worker_init_fn=_Start(self._init),
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


class _Tasks:
    """A sampler of what is to be read next."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


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


class _Start:
    """Tells a worker that its data set is the user's, and calls the user's function."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, _Reader):
            object.__setattr__(info, "dataset", info.dataset.fetch.dataset)  # the process's own copy
        if self._init is not None:
            self._init(worker)


def _as_it_is(batch: Any) -> Any:
    return batch


def _tasks(batches: Sequence[list[int]], generator: torch.Generator | None) -> list[tuple[list[int], int]]:
    first = _peek(generator)
    return [(places, (first + number) % 2**32) for number, places in enumerate(batches)]


def _peek(generator: torch.Generator | None) -> int:
    """A number that a generator would give next."""
    if generator is None:
        return 0
    other = torch.Generator()
    other.set_state(generator.get_state())
    return int(torch.randint(2**32, (), generator=other))
