"""Plain values that local fits have changed in a module's attributes: found, packed as bytes, and set again."""

from __future__ import annotations

import io
import math
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from itertools import chain
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

Path = tuple[str | int, ...]
"""Where a value is: the name of an attribute of a layer, and names of attributes, keys or places inside of it."""

Found = dict[Path, Any]
Change = tuple[Path, Any]

MISSING, LOST = object(), object()
MAX_VALUES = 10_000
"""Values in one attribute that are kept for a client; a history of all steps of a long run is not."""

_DEPTH = 6
_SINGLE = (type(None), bool, int, float, str, bytes)
_KINDS = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque, dict, OrderedDict, Counter)}
_NO_VALUES = (nn.Module, Optimizer, LRScheduler, L.Trainer, *DATA, type, ModuleType, weakref.ref)
_NO_VALUES += (FunctionType, MethodType, BuiltinFunctionType)  # type: ignore[assignment]


def changes(now: Any, first: Any, path: Path, known: Collection[int] = (), depth: int = _DEPTH) -> Iterator[Change]:
    """What a local fit has changed of an attribute: places, with the new value, or ``LOST`` where it is not kept.

    Args:
        now: The value.
        first: What it was; ``MISSING`` where there was none.
        path: Its place.
        known: Ids of layers, parameters, buffers and data, which are no values.
        depth: How far values in values are followed.
    """
    if now is first or id(now) in known or isinstance(now, _NO_VALUES):
        return
    size = _size(now)
    entries = _entries(now) if depth and size == math.inf else None
    if entries is not None and type(now) is type(first):
        before = _entries(first) or {}
        has_grown = isinstance(now, list | tuple | deque) and len(now) > len(first)
        if has_grown or before.keys() - entries.keys():
            yield path, LOST
        for key, value in entries.items() if not has_grown else ():
            if isinstance(key, str | int):
                yield from changes(value, before.get(key, MISSING), (*path, key), known, depth - 1)
    elif entries is not None or not (same(now, first) or (size == math.inf and not _can_differ(now))):
        yield path, LOST if size > MAX_VALUES else now


def _size(value: Any, depth: int = _DEPTH) -> float:
    """Number of plain values; infinite where something else is among them."""
    if isinstance(value, Tensor):
        is_plain = value.layout == torch.strided and not value.is_meta and not isinstance(value, nn.Parameter)
        return value.numel() if is_plain else math.inf
    if isinstance(value, np.ndarray | np.generic):
        return value.size if value.dtype.kind in "biuf" else math.inf
    if type(value) in _SINGLE:
        return 1
    if type(value) not in _KINDS.values() or not depth:
        return math.inf
    parts = chain(value.keys(), value.values()) if isinstance(value, dict) else value
    return sum(_size(part, depth - 1) for part in parts)


def _can_differ(value: Any) -> bool:
    """Whether the content of an object can be told from another's."""
    own: Any = type(value).__eq__
    told = own is not object.__eq__ or hasattr(value, "equals")
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


def put(holder: Any, key: Any, value: Any) -> None:
    """Set a value in a dictionary, list or object; a dictionary or list there takes its content: functions hold it."""
    now = (_entries(holder) or {}).get(key, MISSING)
    if now is value:
        return
    if type(now) is type(value) and isinstance(now, dict):
        now.clear()
        now.update(value)
    elif type(now) is type(value) and isinstance(now, list):
        now[:] = value
    elif isinstance(holder, dict | list | deque):
        holder[key] = value
    elif not isinstance(holder, tuple):
        vars(holder)[key] = value


def set_at(owner: dict[str, Any], path: Path, value: Any) -> None:
    """Set a value at its place, on the device of what is there."""
    holder: Any = owner
    for part in path[:-1]:
        holder = (_entries(holder) or {}).get(part)
    now = (_entries(holder) or {}).get(path[-1])
    is_tensor = isinstance(now, Tensor) and isinstance(value, Tensor)
    put(holder, path[-1], value.to(now.device) if is_tensor else value)  # type: ignore[union-attr]


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
    """A value as tensors, numbers, texts, lists and tuples; bytes as texts, since reading bytes would run code."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.ndarray | np.generic):
        content = value.tobytes().decode("latin1")
        return ("array", isinstance(value, np.generic), value.dtype.str, list(value.shape), content)
    if isinstance(value, bytes):
        return ("bytes", value.decode("latin1"))
    if isinstance(value, dict):
        return (type(value).__name__, None, [(_packed(key), _packed(each)) for key, each in value.items()])
    if type(value) in _KINDS.values():
        return (type(value).__name__, getattr(value, "maxlen", None), [_packed(each) for each in value])
    return value


def _unpacked(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    if value[0] == "bytes":
        return value[1].encode("latin1")
    if value[0] == "array":
        array = np.frombuffer(bytearray(value[4], "latin1"), dtype=np.dtype(value[2])).reshape(value[3])
        return array[()] if value[1] else array
    kind, most, parts = _KINDS[value[0]], value[1], value[2]
    if issubclass(kind, dict):
        return kind({_unpacked(key): _unpacked(each) for key, each in parts})
    items = map(_unpacked, parts)
    return deque(items, most) if kind is deque else kind(items)


def class_values(kind: type) -> dict[str, str]:
    """Plain values that the author's classes hold for all instances, as text, by name."""
    return {
        f"{base.__name__}.{name}": repr(value)
        for base in kind.__mro__
        if not base.__module__.startswith(("torch.", "lightning.", "pytorch_lightning.", "torchmetrics.", "builtins"))
        for name, value in vars(base).items()
        if not name.startswith("_") and _size(value) <= MAX_VALUES
    }
