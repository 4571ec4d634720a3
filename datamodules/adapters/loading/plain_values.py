"""Plain attributes of data sets, such as the level of a curriculum: read, and set."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from torch.utils.data import Dataset

Values = list[dict[str, Any]]
"""Plain attributes of each of some data sets, by name."""

SMALL = 100
"""Values in a container that still counts as plain: a list of all classes or files is content, and no state."""


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
        >>> from pfl_lightning.datamodules.adapters.loading.plain_values import plain_values, set_values
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
