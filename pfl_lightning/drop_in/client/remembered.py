"""Plain values that local fits have changed in a module's attributes: found, packed as bytes, and set again."""

from __future__ import annotations

import io
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pfl_lightning.datamodules.adapters.stages import DATA
from pfl_lightning.state.equality import same

__all__ = ["MISSING", "Changes", "Found", "Path", "class_values", "packed", "set_at", "unpacked"]

Path = tuple[str | int, ...]
"""Where a value is: the name of an attribute of a layer, and names of attributes, keys or places inside of it."""

Found = dict[Path, Any]

MISSING = object()
MAX_VALUES = 10_000
"""Values in one attribute that are kept for a client; a history of all steps of a long run is not."""

_DEPTH = 6
_SINGLE = (type(None), bool, int, float, str, bytes)
_CONTAINERS = (list, tuple, set, frozenset, deque, dict, OrderedDict, Counter)
_KINDS = {kind.__name__: kind for kind in _CONTAINERS}
_NO_VALUES: tuple[Any, ...] = (nn.Module, Optimizer, LRScheduler, L.Trainer, *DATA, type, ModuleType)
_NO_VALUES += (FunctionType, MethodType, BuiltinFunctionType, weakref.ref)


class Changes:
    """What of a layer's attributes a local fit has changed.

    Args:
        known: Ids of layers, parameters, buffers and data, which are no values.

    Attributes:
        found: New values, by their places.
        lost: Names of what has changed and is not kept, each with the reason.
    """

    def __init__(self, known: Collection[int]) -> None:
        self._known = known
        self.found: Found = {}
        self.lost: dict[str, str] = {}

    def compare(self, now: Any, first: Any, path: Path, depth: int = _DEPTH) -> None:
        """Look for changes of a value, and of what it holds."""
        if now is first or id(now) in self._known or isinstance(now, _NO_VALUES):
            return
        is_plain = _is_plain(now)
        entries = _entries(now) if depth and not is_plain else None
        if entries is not None and type(now) is type(first):
            before = _entries(first) or {}
            has_grown = isinstance(now, list | tuple | deque) and len(now) > len(first)
            if has_grown or before.keys() - entries.keys():
                self._lose(path, f"a {type(now).__name__} of other objects")
            for key, value in entries.items() if not has_grown else ():
                if isinstance(key, str | int):
                    self.compare(value, before.get(key, MISSING), (*path, key), depth - 1)
        elif is_plain and (first is MISSING or not same(now, first)):
            if _count(now) > MAX_VALUES:
                self._lose(path, f"more than {MAX_VALUES:,} values")
            else:
                self.found[path] = now
        elif not is_plain and (entries is not None or (_can_differ(now) and not same(now, first))):
            self._lose(path, f"a {type(now).__name__}")

    def _lose(self, path: Path, reason: str) -> None:
        self.lost.setdefault(".".join(map(str, path)), reason)


def _is_plain(value: Any, depth: int = _DEPTH) -> bool:
    if isinstance(value, _SINGLE) and type(value) in _SINGLE:
        return True
    if isinstance(value, Tensor):
        return value.layout == torch.strided and not value.is_meta and not isinstance(value, nn.Parameter)
    if isinstance(value, np.ndarray | np.generic):
        return bool(value.dtype.kind in "biuf")
    if type(value) not in _CONTAINERS or not depth:
        return False
    return all(_is_plain(each, depth - 1) for each in _inside(value))


def _inside(value: Any) -> Iterator[Any]:
    """Keys and values of a container."""
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    else:
        yield from value


def _count(value: Any) -> int:
    if isinstance(value, Tensor | np.ndarray):
        return int(value.numel() if isinstance(value, Tensor) else value.size)
    return sum(map(_count, _inside(value))) if type(value) in _CONTAINERS else 1


def _can_differ(value: Any) -> bool:
    """Whether the content of an object can be told from another's."""
    kind: Any = type(value)
    told = kind.__eq__ is not object.__eq__ or hasattr(value, "equals")
    return told or isinstance(value, torch.Generator | Enum)


def _entries(value: Any) -> Mapping[Any, Any] | None:
    """What a container or an object holds, by keys, places or attributes; ``None`` of what is compared as a whole.

    Members of an enumeration are objects that all clients have, whose attributes are not theirs.
    """
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    whole = isinstance(value, Tensor | Enum) or hasattr(value, "equals")
    return None if whole else getattr(value, "__dict__", None)


def set_at(owner: dict[str, Any], path: Path, value: Any) -> None:
    """Set a value at its place, in the dictionary or list that is there already, which functions may hold, too."""
    holder: Any = owner
    for part in path[:-1]:
        holder = (_entries(holder) or {}).get(part)
    last = path[-1]
    now = (_entries(holder) or {}).get(last, MISSING)
    if isinstance(now, Tensor) and isinstance(value, Tensor):
        value = value.to(now.device)
    if isinstance(now, dict) and isinstance(value, dict):
        now.clear()
        now.update(value)
    elif type(now) is type(value) is list:
        now[:] = value
    elif isinstance(holder, dict | list):
        holder[last] = value  # type: ignore[index]  # as it was found
    elif not isinstance(holder, tuple):
        vars(holder)[last] = value


def packed(networks: list[dict[str, Found]]) -> bytes:
    """Values of each network, by the names of its layers, as bytes; none where nothing has changed."""
    if not any(networks):
        return b""
    content = [
        [(name, [(list(path), _packed(value)) for path, value in found.items()]) for name, found in network.items()]
        for network in networks
    ]
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def unpacked(content: bytes) -> list[dict[str, Found]]:
    """What :func:`packed` was given, read without running code."""
    if not content:
        return []
    found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return [{name: {tuple(path): _unpacked(v) for path, v in own} for name, own in network} for network in found]


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray | np.generic):
        return ("array", isinstance(value, np.generic), value.dtype.str, list(value.shape), _text(value.tobytes()))
    if isinstance(value, bytes):
        return ("bytes", _text(value))
    if isinstance(value, dict):
        pairs = [(_packed(key), _packed(each)) for key, each in value.items()]
        return (type(value).__name__, None, pairs)
    if type(value) in _CONTAINERS:
        return (type(value).__name__, getattr(value, "maxlen", None), [_packed(each) for each in value])
    return value


def _text(content: bytes) -> str:
    """Bytes as a text: as they are, reading them would run code."""
    return content.decode("latin1")


def _unpacked(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    if value[0] == "bytes":
        return value[1].encode("latin1")
    if value[0] == "array":
        array = np.frombuffer(bytearray(value[4], "latin1"), dtype=np.dtype(value[2])).reshape(value[3])
        return array[()] if value[1] else array
    kind, most, parts = value
    if issubclass(_KINDS[kind], dict):
        return _KINDS[kind]({_unpacked(key): _unpacked(each) for key, each in parts})
    items = [_unpacked(each) for each in parts]
    return deque(items, most) if kind == "deque" else _KINDS[kind](items)


def class_values(kind: type) -> dict[str, str]:
    """Plain values that the author's classes hold for all instances, as text, by name."""
    return {
        f"{base.__name__}.{name}": repr(value)
        for base in kind.__mro__
        if not base.__module__.startswith(("torch.", "lightning.", "pytorch_lightning.", "torchmetrics.", "builtins"))
        for name, value in vars(base).items()
        if not name.startswith("_") and _is_plain(value) and _count(value) <= MAX_VALUES
    }
