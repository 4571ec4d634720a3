"""Orders in which a client's items come, where the user's loader has a sampler or batch sampler of its own."""

from __future__ import annotations

import copy
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import Dataset, RandomSampler, WeightedRandomSampler

MAX_PLACES = 1_000_000
"""A sampler that gives more than this, and ten times the items that there are, is taken for one without an end."""


class Order(ABC):
    """What of a client's items comes in one pass, and in which batches."""

    @abstractmethod
    def batches(
        self, indices: Tensor, batch_size: int, drop_last: bool, generator: torch.Generator, epoch: int | None = None
    ) -> list[list[int]]:
        """Places of the items of each batch of one pass.

        Args:
            indices: The client's items, shape (n,), int64.
            batch_size: Items in a batch; not used where the sampler gives batches.
            drop_last: Whether an incomplete last batch is dropped; not used where the sampler gives batches.
            generator: CPU generator of what is random.
            epoch: What a Trainer has told the loader's sampler (``set_epoch``); ``None`` if none has.
        """

    def count(self, size: int) -> int | None:
        """Number of items that a client with ``size`` items sees in a pass; ``None`` if each pass has another."""
        return None


class DrawnOrder(Order):
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
        """Draw the items of a pass, see :meth:`Order.batches`."""
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


class SampledOrder(Order):
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
        """The client's part of one pass of the sampler, see :meth:`Order.batches`.

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
                f"the {type(sampler).__name__} of a loader over {length} items has given {limit} of them and goes on: "
                "the items of each client are picked out of a whole pass, so that it must end; give a list of loaders, "
                "one a client, of which each is used as it is"
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
