"""Images of an object at some time: whether it has changed since, and how it returns to that."""

from __future__ import annotations

import hashlib
import logging
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from pfl_lightning.functional.tensor_lists import copied, magnitudes
from pfl_lightning.messages import LARGEST, Message
from pfl_lightning.state.client_states import ClientStates, Journal

VALUES = (type(None), bool, int, float, complex, str, bytes)
STATELESS = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, logging.Logger)

# What a checkpoint saves, or torch's own bookkeeping.
TORCHS_OWN = frozenset(vars(nn.Module()))
DEPTH = 8
"""Attributes of attributes are followed so far."""
MAX_VALUES = 100_000
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
        return dict(islice(self._walk(module, known), MAX_VALUES))

    def _walk(self, root: nn.Module, saved: set[int]) -> Iterator[tuple[str, str]]:
        clients: list[str] = []
        for prefix, module in root.named_modules():
            is_client = isinstance(module, L.LightningModule) and module is not root
            if is_client or any(prefix.startswith(f"{client}.") for client in clients):
                clients.append(prefix)
                continue
            place = f"{prefix}." if prefix else ""
            ignored = self._ignored
            if module is not root:  # such as another aggregator, which names what may change
                own = getattr(module, "_base_attributes", ()), getattr(module, "not_checkpointed", ())
                ignored = frozenset((*own[0], "_base_attributes", *own[1]))
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
        elif isinstance(value, VALUES):
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


# ---------------------------------------------------------------------- put it back

# Messages are frozen, and a Trainer or a data module is not the server's.
NOT_OWN: tuple[type, ...] = (Message, UnsavedState, L.Trainer, L.LightningDataModule)
LEAVES = (*VALUES, *STATELESS, np.generic, torch.dtype, torch.device, torch.Size, *NOT_OWN)


@dataclass(frozen=True, eq=False)
class _Kept:
    tensor: Tensor
    version: int
    copy: Tensor


class Growth(NamedTuple):
    """Change of a server's numbers since a snapshot.

    Attributes:
        fault: What is wrong, such as a tensor that is not finite any more, or beyond
            :data:`~pfl_lightning.messages.LARGEST`; ``None`` if nothing is.
        factor: Largest factor by which the largest absolute value of a tensor has grown. Running statistics, tensors
            that were zero, and values of at most ``factor`` do not count.
        name: Name of that tensor.
    """

    fault: str | None
    factor: float
    name: str


class Snapshot:
    """State of a server at some time, to which it can return: tensors, Python attributes, and clients' states.

    Lists, dictionaries and objects are followed to whatever depth. Tensors and arrays are copied, but for tensors that
    have not changed since another snapshot that is still held, which share its copies; of clients' states those are
    copied that change later.

    That a tensor has changed is seen by its version, which optimizers with ``fused=True`` leave as it is: between two
    snapshots their steps must be told (``torch.autograd.graph.increment_version``), as ``Learner`` does.

    Args:
        server: The server, or a part of it.
        extra_states: Clients' states that are not the server's, and return with it.
    """

    newest: ClassVar[WeakValueDictionary[int, _Kept]] = WeakValueDictionary()
    """Copies that snapshots hold, the newest of each tensor, by the tensor's ``id``."""

    def __init__(self, server: nn.Module, extra_states: Sequence[ClientStates] = ()) -> None:
        self._tensors: dict[int, _Kept] = {}
        fresh: list[tuple[Tensor, int]] = []  # with versions
        self._contents: list[tuple[Any, Any]] = []
        self._journals: list[tuple[ClientStates, Journal]] = []
        seen, left = set[int](), list[Any]([server, *extra_states])
        while left:
            value = left.pop()
            if isinstance(value, LEAVES) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                version = -1 if value.is_inference() else value._version  # which those of inference mode do not have
                kept = self.newest.get(id(value))
                if kept is None or kept.tensor is not value or kept.version != version or version < 0:
                    fresh.append((value, version))
                else:
                    self._tensors[id(value)] = kept
            elif isinstance(value, ClientStates):
                self._journals.append((value, value.journal()))
            elif isinstance(value, np.ndarray):
                self._contents.append((value, value.copy()))
            elif isinstance(value, torch.Generator):
                self._contents.append((value, value.get_state()))
            elif isinstance(value, dict | list | deque | set):
                self._contents.append((value, value.copy()))
                left.extend(value.values() if isinstance(value, dict) else value)
            elif isinstance(value, tuple | frozenset):
                left.extend(value)
            elif isinstance(value, L.LightningModule):  # which also knows its Trainer
                left.extend((value._parameters, value._buffers, value._modules))
            elif hasattr(value, "__dict__"):
                left.append(vars(value))
        for (value, version), copy in zip(fresh, copied([value for value, _ in fresh]), strict=True):
            self._tensors[id(value)] = self.newest[id(value)] = _Kept(value, version, copy)
        own = (*server.named_parameters(), *server.named_buffers())
        self._copies = {name: self._tensors[id(t)].copy for name, t in own if id(t) in self._tensors}

    @torch.no_grad()
    def restore(self) -> None:
        """Let the server hold again what it held."""
        for value, content in self._contents:
            if isinstance(value, np.ndarray):
                value[...] = content
            elif isinstance(value, torch.Generator):
                value.set_state(content)
            else:
                value.clear()
                value.update(content) if isinstance(value, dict | set) else value.extend(content)
        for kept in self._tensors.values():
            if _has_changed(kept):
                kept.tensor.copy_(kept.copy)
        for store, journal in self._journals:
            store.undo(journal)

    def growth(self, server: nn.Module) -> Growth:
        """Change of the server's numbers since the snapshot."""
        found = Growth(None, 1.0, "")
        held = (*server.named_parameters(), *server.named_buffers())
        tensors = {name: tensor for name, tensor in held if tensor.layout == torch.strided}
        copies = {name: self._copies[name] for name in tensors if name in self._copies}
        sizes = magnitudes([*tensors.values(), *copies.values()])
        earlier = dict(zip(copies, sizes[len(tensors) :], strict=True))
        for name, now in zip(tensors, sizes, strict=False):
            before = earlier.get(name, 0.0)
            if not now <= LARGEST and before <= LARGEST:
                return found._replace(fault=f"{name} is up to {now:.3g} after the aggregation")
            factor = min(now / before, now) if before > 0 and "running_" not in name else 1.0
            if factor > found.factor:
                found = Growth(None, factor, name)
        changed = [(client, *item) for s, j in self._journals for client in j.rows for item in s.get(client).items()]
        for (client, name, _), now in zip(changed, magnitudes([tensor for *_, tensor in changed]), strict=True):
            if not now <= LARGEST:
                return found._replace(fault=f"{name} of client {client} is up to {now:.3g} after the aggregation")
        return found


def _has_changed(kept: _Kept) -> bool:
    """Whether a tensor is no more what it was; where its version says nothing, its numbers do."""
    tensor = kept.tensor
    if tensor.is_inference() or tensor._version != kept.version:
        return True
    comparable = tensor.layout == torch.strided and not tensor.is_meta
    return comparable and not torch.equal(tensor, kept.copy)
