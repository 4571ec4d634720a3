"""Which items of a data set the sampler of a loader can give: often a part, which other loaders do not have."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from pfl_lightning.datamodules.adapters.loading.orders import afresh, ending, seeded_draws

__all__ = ["LISTS", "goes_through", "places_of", "selected"]

LISTS = (list, tuple, range, Tensor, np.ndarray)
"""What a DataLoader takes for a sampler beside samplers."""

FEW = 1000
"""Items of a data set of which random passes may be the same by chance."""

EPOCHS = (0, 1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
"""Epochs that are looked at: a curriculum adds items later."""


def goes_through(sampler: Any, length: int | None) -> bool:
    """Whether a sampler gives every item once, in order or shuffled.

    Args:
        sampler: The sampler of a loader.
        length: Number of items of its data set; ``None`` where that is not known.
    """
    if type(sampler) is RandomSampler and (sampler.replacement or sampler._num_samples is not None):
        return False
    return type(sampler) in (RandomSampler, SequentialSampler) and _range_of(sampler, length) is None


def selected(sampler: Any, length: int | None) -> list[int] | None:
    """Places of the items that a sampler gives once each, in order or shuffled, where they are a part; else ``None``.

    Args:
        sampler: The sampler of a loader.
        length: Number of items of its data set; ``None`` where that is not known.

    Example:
        >>> selected([4, 2], 5), selected(SequentialSampler(range(3)), 5), selected(SequentialSampler(range(5)), 5)
        ([4, 2], [0, 1, 2], None)
    """
    if isinstance(sampler, SubsetRandomSampler) and type(sampler).__iter__ is SubsetRandomSampler.__iter__:
        return [int(place) for place in sampler.indices]
    if type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    ):
        return _range_of(sampler, length)
    if not isinstance(sampler, LISTS):
        return None
    places = [int(place) for place in sampler if _is_place(place)]  # not those of lists of them
    return places if len(set(places)) == len(sampler) else None  # others are drawn as they come


def places_of(sampler: Any, length: int) -> list[int] | None:
    """Places of the items that a sampler, or a batch sampler, can give; ``None`` where it can give all.

    A sampler of the user's is asked: its places are a selection if several passes give the same ones.

    Args:
        sampler: What gives places, or lists of them.
        length: Number of items of the data set.

    Example:
        >>> places_of([[3, 1], [1, 2]], 5), places_of(WeightedRandomSampler([0.0, 1.0, 2.0], 9), 3)
        ([1, 2, 3], [1, 2])
        >>> places_of(RandomSampler(range(5), num_samples=2), 5) is None
        True
    """
    once = selected(sampler, length)
    if once is not None:
        return once
    if type(sampler) is RandomSampler or type(sampler) is SequentialSampler:
        return _range_of(sampler, length)
    if type(sampler) is WeightedRandomSampler:
        found = {place for place, weight in enumerate(torch.as_tensor(sampler.weights).tolist()) if weight > 0}
    else:
        passes = _passes(sampler, length)
        if not passes or any(each != passes[0] for each in passes):
            return None
        found = passes[0]
    return sorted(found) if found and len(found) < length and max(found) < length and min(found) >= 0 else None


def _range_of(sampler: Any, length: int | None) -> list[int] | None:
    """The first places, where the sampler of another collection has fewer than there are items."""
    source = sampler.data_source
    known = length is not None and hasattr(source, "__len__")
    return list(range(len(source))) if known and len(source) < length else None  # type: ignore[operator]


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
