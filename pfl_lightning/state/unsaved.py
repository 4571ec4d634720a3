"""Content of Python attributes, which a checkpoint does not save: a method that relies on it is noticed."""

from __future__ import annotations

import hashlib
import logging
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["UnsavedState", "content_hash"]

# What a checkpoint saves, or torch's own bookkeeping.
TORCHS_OWN = frozenset(vars(nn.Module()))
STATELESS = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, logging.Logger)
DEPTH = 8
"""Attributes of attributes are followed so far."""
MOST = 100_000
"""Values that are compared at most: a server that holds a long list is not searched for seconds."""


class UnsavedState:
    """Python attributes and non-persistent buffers of a module as they were at some time.

    Numbers, strings, tensors, arrays and generators count, in lists, dictionaries and objects, too. Modules inside that
    are clients (any LightningModule) are left out: the engines change them.

    Args:
        module: The module.
        ignored: Names of attributes of ``module`` that may change.
        saved: Objects whose content is saved.
        buffers: Whether non-persistent buffers count, too.
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: Collection[str] = (),
        saved: Iterable[object] = (),
        buffers: bool = True,
    ) -> None:
        self._ignored, self._buffers = frozenset(ignored), buffers
        self._digests: dict[int, tuple[Tensor, int, str]] = {}  # of tensors that have not changed since
        self._before = self._content(module, saved)

    def first_change(self, module: nn.Module, saved: Iterable[object] = ()) -> str | None:
        """Name of the first attribute of ``module`` that has changed; ``None`` if none has."""
        now = self._content(module, saved)
        for name in (*now, *self._before):
            if now.get(name) != self._before.get(name):
                return name
        return None

    def _content(self, module: nn.Module, saved: Iterable[object]) -> dict[str, str]:
        self._known, self._digests = self._digests, {}
        known = {id(one) for one in (*module.parameters(), *module.buffers(), *saved)}
        return dict(islice(self._walk(module, known), MOST))

    def _walk(self, root: nn.Module, saved: set[int]) -> Iterator[tuple[str, str]]:
        clients: list[str] = []
        for prefix, module in root.named_modules():
            is_client = isinstance(module, L.LightningModule) and module is not root
            if is_client or any(prefix.startswith(f"{client}.") for client in clients):
                clients.append(prefix)
                continue
            place = f"{prefix}." if prefix else ""
            ignored = self._ignored if module is root else _own_ignored(module)
            for name, buffer in module._buffers.items() if self._buffers else ():
                if buffer is not None and name in module._non_persistent_buffers_set:
                    yield f"{place}{name}", self._digest(buffer)
            for name, value in vars(module).items():
                cached = isinstance(getattr(type(module), name, None), cached_property)
                if name not in TORCHS_OWN and name not in ignored and not cached:
                    yield from self._leaves(f"{place}{name}", value, saved, ())

    def _leaves(self, name: str, value: Any, saved: set[int], above: tuple[int, ...]) -> Iterator[tuple[str, str]]:
        """Every number, string and tensor that ``value`` holds, by its name, as text that tells contents apart."""
        if id(value) in saved:
            return
        if isinstance(value, Tensor):
            yield name, self._digest(value)
        elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
            yield name, repr(value)
        elif isinstance(value, torch.Generator):
            yield name, self._digest(value.get_state())
        elif isinstance(value, np.ndarray | np.generic):
            yield name, repr((value.shape, value.tobytes()))
        elif isinstance(value, np.random.Generator):
            yield name, repr(value.bit_generator.state)
        elif isinstance(value, random.Random):
            yield name, repr(value.getstate())
        elif not isinstance(value, (*STATELESS, L.LightningModule)) and id(value) not in above and len(above) < DEPTH:
            for part, content in _parts(value):
                yield from self._leaves(f"{name}{part}", content, saved, (*above, id(value)))

    def _digest(self, tensor: Tensor) -> str:
        version = 0 if tensor.is_inference() else tensor._version
        known = self._known.get(id(tensor))
        if known is None or known[0] is not tensor or known[1] != version:
            known = (tensor, version, f"{tuple(tensor.shape)} {tensor.dtype} {content_hash(tensor)}")
        self._digests[id(tensor)] = known
        return known[2]


def _own_ignored(module: nn.Module) -> frozenset[str]:
    """Attributes that a module inside, such as another aggregator, says may change."""
    base, unsaved = getattr(module, "_base_attributes", ()), getattr(module, "unsaved", ())
    return frozenset((*base, "_base_attributes", *unsaved))


def content_hash(tensor: Tensor) -> str:
    """Hash of a tensor's content; empty where its content cannot be read, which must not end a run."""
    try:
        dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
        # Into memory of its own: a single element may have any stride, and could not be viewed as bytes.
        plain = torch.empty(dense.shape, dtype=dense.dtype).copy_(dense.resolve_conj().resolve_neg())
        return hashlib.blake2b(plain.reshape(-1).view(torch.uint8).numpy().data, digest_size=16).hexdigest()
    except (RuntimeError, NotImplementedError, TypeError):
        return ""


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Contents of a container or an object, each with what to add to its name."""
    if isinstance(value, Mapping):
        for place, (key, item) in enumerate(value.items()):
            yield f"[{key!r}]" if isinstance(key, str | int) else f"[{place}]", item
    elif isinstance(value, list | tuple | deque):
        for place, item in enumerate(value):
            yield f"[{place}]", item
    elif isinstance(value, set | frozenset):
        yield "", tuple(sorted(map(repr, value)))
    else:
        for key, item in getattr(value, "__dict__", {}).items():
            yield f".{key}", item
