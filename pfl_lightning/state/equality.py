"""Whether two values hold the same: the one comparison of attributes, options and tensors of any kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def same(one: Any, other: Any, nan: bool = False) -> bool:
    """Whether two values are of one type and hold the same; not where that cannot be told.

    An object is the same as itself. Tensors are compared on any device, sparse ones by their content and those on
    ``"meta"`` by their form; dictionaries with the order of their keys. Values whose comparison fails, or has no truth
    value, are not the same.

    Args:
        one: A value.
        other: Another one.
        nan: Whether NaN equals NaN in tensors.

    Example:
        >>> same({"lr": [0.1, torch.ones(2)]}, {"lr": [0.1, torch.ones(2)]}), same(1, True), same(torch.ones(1), 1.0)
        (True, False, False)
    """
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):  # a parameter may hold the same as a plain tensor
        return _same_tensors(one, other, nan)
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(value, other[key], nan) for key, value in one.items())
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(same(*pair, nan) for pair in zip(one, other, strict=True))
    try:
        if isinstance(one, np.ndarray):
            return one.dtype == other.dtype and np.array_equal(one, other)
        if hasattr(one, "equals"):  # a table of pandas, whose comparisons are tables
            return bool(one.equals(other))
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # arrays in arrays, or a comparison that gives an array
        return False


def _same_tensors(one: Tensor, other: Tensor, nan: bool) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    wanted = other.to(one.device)
    if one.layout != torch.strided or wanted.layout != torch.strided:
        one, wanted = one.to_dense(), wanted.to_dense()
    if not nan:
        return torch.equal(one, wanted)
    return bool(((one == wanted) | ((one != one) & (wanted != wanted))).all())
