"""Samplers of the user's loaders: which items they give, and the order in which those of a client come."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import Dataset, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

MAX_PLACES = 1_000_000
"""A sampler that gives more than this, and ten times the items that there are, is taken for one without an end."""

LISTS = (list, tuple, range, Tensor, np.ndarray)
"""What a DataLoader takes for a sampler beside samplers."""

WHOLE = (RandomSampler, SequentialSampler)
"""Samplers of all items of a collection."""

FEW = 1000
"""Items of a data set of which random passes may be the same by chance."""

EPOCHS = (0, 1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
"""Epochs that are looked at: a curriculum adds items later."""


class DrawnOrder:
    """Items that are drawn at random, each as often as its weight says: the client's share of all draws.

    Args:
        weights: Weight of every item of the data set, shape (N,); ``None`` for equal ones.
        num_samples: Draws in a pass over the whole data set.
        length: Number of its items, N.
        replacement: Whether an item may be drawn again before all others have been.

    Example:
        >>> order = DrawnOrder(torch.tensor([0.0, 0.0, 1.0, 0.0]), num_samples=8, length=4, replacement=True)
        >>> order.batches(torch.tensor([0, 2]), 3, False, torch.Generator())  # two of four items: four of eight draws
        [[2, 2, 2], [2]]
    """

    def __init__(self, weights: Tensor | None, num_samples: int, length: int, replacement: bool) -> None:
        self._weights, self._per_item, self._replacement = weights, num_samples / length, replacement

    def count(self, size: int) -> int:
        """The client's share of the draws; at least one."""
        return max(1, round(size * self._per_item))

    def batches(
        self, indices: Tensor, batch_size: int, drop_last: bool, generator: torch.Generator, epoch: int | None = None
    ) -> list[list[int]]:
        """Draw the items of a pass, see :meth:`SampledOrder.batches`."""
        return _in_batches(self._draw(indices, generator).tolist(), batch_size, drop_last)

    def _draw(self, indices: Tensor, generator: torch.Generator) -> Tensor:
        count = self.count(len(indices))
        if self._weights is None and not self._replacement:
            passes = [torch.randperm(len(indices), generator=generator) for _ in range(-(-count // len(indices)))]
            return indices[torch.cat(passes)[:count]]
        weights = torch.ones(len(indices)) if self._weights is None else self._weights[indices]
        if not self._replacement:
            count = min(count, int((weights > 0).sum()))
        if not bool(weights.sum() > 0):  # none of its items is ever drawn
            return indices[:0]
        return indices[torch.multinomial(weights, count, self._replacement, generator=generator)]


class SampledOrder:
    """A client's items in the order of a sampler of the whole data set, which may leave out items or repeat them.

    Args:
        sampler: The user's sampler, or batch sampler.
        length: Number of items of the data set that it is of, N.
        selection: Places in it of the items that are divided; ``None`` for all.
        batched: Whether it gives batches, of which the client gets its own items.

    Example:
        >>> SampledOrder([3, 1, 3, 0], 4).batches(torch.tensor([0, 3]), 2, False, torch.Generator())
        [[3, 3], [0]]
        >>> SampledOrder([[3, 1], [0, 3], [2]], 4, batched=True).batches(
        ...     torch.tensor([0, 3]), 1, False, torch.Generator()
        ... )
        [[3], [0, 3]]
    """

    def __init__(
        self, sampler: Iterable[Any], length: int, selection: Sequence[int] | None = None, batched: bool = False
    ) -> None:
        self._sampler, self._length, self._batched = sampler, length, batched
        # The number of each item among those that are divided; that of one that is none of them is beyond all.
        self._numbers = torch.arange(length)
        if selection is not None:
            self._numbers = torch.full((length,), length - 1)
            self._numbers[torch.tensor(selection, dtype=torch.int64)] = torch.arange(len(selection))

    def batches(
        self, indices: Tensor, batch_size: int, drop_last: bool, generator: torch.Generator, epoch: int | None = None
    ) -> list[list[int]]:
        """Places of the items of each batch of one pass: the client's part of a pass of the sampler.

        Args:
            indices: The client's items, shape (n,), int64.
            batch_size: Items in a batch; not used where the sampler gives batches.
            drop_last: Whether an incomplete last batch is dropped; not used where the sampler gives batches.
            generator: CPU generator of what is random.
            epoch: What a Trainer has told the loader's sampler (``set_epoch``); ``None`` if none has.

        Raises:
            ValueError: The sampler has no end.
        """
        mask = torch.zeros(self._length, dtype=torch.bool)
        mask[indices] = True
        own, numbers, sampler = mask.tolist(), self._numbers.tolist(), afresh(self._sampler)
        with seeded_draws(generator, sampler, epoch):
            given = ending(sampler, self._length)
            drawn = [[numbers[int(place)] for place in batch] for batch in (given if self._batched else [given])]
        found = [[place for place in batch if own[place]] for batch in drawn]
        return [batch for batch in found if batch] if self._batched else _in_batches(found[0], batch_size, drop_last)

    def count(self, size: int) -> int | None:
        """Number of items that a client with ``size`` items sees in a pass; ``None``, as each may have another."""
        return None


Order = DrawnOrder | SampledOrder
"""What of a client's items comes in one pass, and in which batches."""


def _in_batches(places: list[int], size: int, drop_last: bool) -> list[list[int]]:
    found = [places[start : start + size] for start in range(0, len(places), size)]
    return found[:-1] if drop_last and found and len(found[-1]) < size else found


def order_of(sampler: Any, length: int, selection: Sequence[int] | None = None) -> Order:
    """The order of a sampler that neither shuffles nor goes through the items one by one.

    Args:
        sampler: The user's sampler of places.
        length: Number of items of the data set that it is of.
        selection: Places in it of the items that are divided; ``None`` for all.
    """
    number = length if selection is None else len(selection)
    if type(sampler) is WeightedRandomSampler and len(sampler.weights) <= length:
        weights = torch.zeros(length, dtype=torch.float64)
        weights[: len(sampler.weights)] = torch.as_tensor(sampler.weights, dtype=torch.float64)
        weights = weights if selection is None else weights[list(selection)]
        return DrawnOrder(weights, sampler.num_samples, number, sampler.replacement)
    if type(sampler) is RandomSampler:
        return DrawnOrder(None, sampler.num_samples, number, sampler.replacement)
    return SampledOrder(sampler, length, selection)


@contextmanager
def seeded_draws(generator: torch.Generator, sampler: Any = None, epoch: int | None = None) -> Iterator[None]:
    """Inside, the user's code draws from generators that are seeded for it: torch's, Python's, NumPy's, the sampler's.

    Args:
        generator: CPU generator that gives the seed.
        sampler: What is asked for items inside; a generator of its own is seeded, too, and ``set_epoch`` called.
        epoch: The Trainer's epoch; ``None`` for one of the seed, so that passes differ where nobody counts them.
    """
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator)) % 2**32
    with isolate_rng(include_cuda=False):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  (samplers draw from it)
        for owner in (sampler, getattr(sampler, "sampler", None)):
            own = getattr(owner, "generator", None)
            if isinstance(own, torch.Generator):
                own.manual_seed(seed)
        tell_epoch(seed % 2**31 if epoch is None else epoch, sampler)
        yield


def tell_epoch(epoch: int, sampler: Any) -> None:
    """Call ``set_epoch`` of a sampler, and of the one that a batch sampler has, as a Trainer does."""
    for owner in (sampler, getattr(sampler, "sampler", None)):
        set_epoch = getattr(owner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def ending(sampler: Iterable[Any], length: int) -> Iterator[Any]:
    """What a sampler gives, which is not read for ever."""
    limit = max(MAX_PLACES, 10 * length)
    for count, given in enumerate(sampler):
        if count == limit:
            raise ValueError(
                f"the {type(sampler).__name__} of a loader over {length} items has given {limit} of them and does not "
                "stop: each client's items are selected from one whole pass, which must end. Pass a list of loaders, "
                "one for each client; each is used as it is"
            )
        yield given


def afresh(sampler: Any) -> Any:
    """A copy of a sampler: what it changes of itself in a pass, such as a list that it shuffles, reaches no other pass.

    Data sets in it are not copied; a sampler that cannot be copied is used as it is.
    """
    owners = (sampler, getattr(sampler, "sampler", None))
    values = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    try:
        return copy.deepcopy(sampler, {id(value): value for value in values if isinstance(value, Dataset)})
    except Exception:  # whatever an object's own copying may raise
        return sampler


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
                given = (one if isinstance(one, LISTS) and not _is_place(one) else [one] for one in ending(own, length))
                found.append({int(place) for each in given for place in each})
        except Exception:  # of the user's code; without an end, or no numbers: said where its items are read
            return []
    return found


def _is_place(value: Any) -> bool:
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0
