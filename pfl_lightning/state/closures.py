"""Copies of a module whose functions hold its layers.

``copy.deepcopy`` leaves functions as they are. A layer that calls its parts by a function made in ``__init__``, such as
``self.mlpf = lambda x: m.dropout(m.c_proj(x))``, and a forward hook that keeps what it sees in ``self``, would go on
with the layers of the original: those of the copy would never be trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from types import CellType, FunctionType
from typing import Any, TypeVar

from torch import nn

_OF_TORCH = ("_parameters", "_buffers", "_modules")
_Module = TypeVar("_Module", bound=nn.Module)


def copy_module(module: _Module, memo: dict[int, Any] | None = None) -> _Module:
    """``copy.deepcopy`` of a module, with functions that hold the layers of the copy.

    Args:
        module: The original.
        memo: What is not copied, as ``copy.deepcopy`` takes it.
    """
    copied = copy.deepcopy(module, memo)
    bind_functions(module, copied)
    return copied


def bind_functions(module: nn.Module, copied: nn.Module, kept: Iterable[dict[str, Any]] = ()) -> None:
    """Let functions among the attributes of a copy, and its hooks, hold the layers of the copy.

    Args:
        module: The original.
        copied: What ``copy.deepcopy`` made of it.
        kept: Values of attributes that are kept apart to be given to the copy later.
    """
    places: dict[int, Any] = {}
    layers = dict(copied.named_modules(remove_duplicate=False))
    for place, own in module.named_modules(remove_duplicate=False):
        if place not in layers:  # a layer that copies itself in a way of its own
            continue
        places[id(own)] = other = layers[place]
        for name, value in vars(own).items():
            if isinstance(value, dict | list) and name in vars(other):
                places[id(value)] = vars(other)[name]
    for kind in ("named_parameters", "named_buffers"):
        others = dict(getattr(copied, kind)(remove_duplicate=False))
        for name, value in getattr(module, kind)(remove_duplicate=False):
            if name in others:
                places[id(value)] = others[name]
    for layer in copied.modules():
        for name, value in list(vars(layer).items()):
            if name not in _OF_TORCH:
                _bind_at(vars(layer), name, value, places)
    for values in kept:
        for name, value in list(values.items()):
            _bind_at(values, name, value, places)


def _bind_at(holder: Any, key: Any, value: Any, places: Mapping[int, Any], within: bool = True) -> None:
    """Bind a function, or those that a dictionary or list holds, in its place."""
    if isinstance(value, FunctionType):
        holder[key] = _bound(value, places)
    elif within and isinstance(value, dict | list):
        for name, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
            _bind_at(value, name, part, places, within=False)


def _bound(function: FunctionType, places: Mapping[int, Any], outer: tuple[FunctionType, ...] = ()) -> FunctionType:
    """The function with what it holds in its place, functions that it calls included; itself where that is nothing."""
    if function in outer:  # it calls itself
        return function

    def placed(value: Any) -> Any:
        if isinstance(value, FunctionType):
            return _bound(value, places, (*outer, function))
        return places.get(id(value), value)

    cells, defaults, named = function.__closure__ or (), function.__defaults__ or (), function.__kwdefaults__ or {}
    before = [*map(_content, cells), *defaults, *named.values()]
    after = [placed(value) for value in before]
    if all(own is other for own, other in zip(before, after, strict=True)):
        return function
    closure = tuple(
        cell if own is other and own is not function else CellType(other)
        for cell, own, other in zip(cells, before, after, strict=False)
    )
    values = tuple(after[len(cells) : len(cells) + len(defaults)])
    made = FunctionType(function.__code__, function.__globals__, function.__name__, values, closure)
    made.__kwdefaults__ = dict(zip(named, after[len(cells) + len(defaults) :], strict=True))
    made.__qualname__, made.__doc__ = function.__qualname__, function.__doc__
    vars(made).update(vars(function))
    for cell, own in zip(closure, before, strict=False):
        if own is function:
            cell.cell_contents = made
    return made


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return cell
