"""What a server held at some time, so that it can return to it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from pfl_lightning.messages import LARGEST, Message, magnitude
from pfl_lightning.state.client_states import ClientStates, Journal
from pfl_lightning.state.unsaved import UnsavedState

__all__ = ["Growth", "Snapshot"]

LEAVES = (type(None), bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, torch.Size)
LEAVES += (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, logging.Logger)  # type: ignore[assignment]
# Messages are frozen, and the others are not the server's.
LEAVES += (Message, UnsavedState, L.Trainer, L.LightningDataModule)  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class _Kept:
    tensor: Tensor
    version: int
    copy: Tensor


COPIES: WeakValueDictionary[int, _Kept] = WeakValueDictionary()
"""Copies that a snapshot holds, the newest of each tensor, by the tensor's ``id``."""


class Growth(NamedTuple):
    """How a server's numbers have changed since a snapshot.

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
    """What a server held at some time, to which it can return: tensors, Python attributes, and clients' states.

    Lists, dictionaries and objects are followed to whatever depth. Tensors and arrays are copied, but for tensors that
    have not changed since another snapshot that is still held, which share its copies; of clients' states those are
    copied that change later.

    That a tensor has changed is seen by its version, which optimizers with ``fused=True`` leave as it is: between two
    snapshots their steps must be told (``torch.autograd.graph.increment_version``), as ``Learner`` does.

    Args:
        server: The server, or a part of it.
        beside: Clients' states that are not the server's, and return with it.
    """

    def __init__(self, server: nn.Module, beside: Sequence[ClientStates] = ()) -> None:
        self._tensors: dict[int, _Kept] = {}
        self._contents: list[tuple[Any, Any]] = []
        self._journals: list[tuple[ClientStates, Journal]] = []
        seen, left = set[int](), list[Any]([server, *beside])
        while left:
            value = left.pop()
            if isinstance(value, LEAVES) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Tensor):
                version = -1 if value.is_inference() else value._version  # which those of inference mode do not have
                kept = COPIES.get(id(value))
                if kept is None or kept.tensor is not value or kept.version != version or version < 0:
                    kept = COPIES[id(value)] = _Kept(value, version, value.detach().clone())
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
        """How the server's numbers have changed since the snapshot."""
        found = Growth(None, 1.0, "")
        for name, tensor in (*server.named_parameters(), *server.named_buffers()):
            if tensor.layout != torch.strided:
                continue
            copy, now = self._copies.get(name), magnitude(tensor)
            before = 0.0 if copy is None else magnitude(copy)
            if not now <= LARGEST and before <= LARGEST:
                return found._replace(fault=f"{name} holds {now:.3g} after the aggregation")
            factor = min(now / before, now) if before > 0 and "running_" not in name else 1.0
            if factor > found.factor:
                found = Growth(None, factor, name)
        changed = [(client, *item) for s, j in self._journals for client in j.rows for item in s.get(client).items()]
        for client, name, tensor in changed:
            if not (now := magnitude(tensor)) <= LARGEST:
                return found._replace(fault=f"{name} of client {client} holds {now:.3g} after the aggregation")
        return found


def _has_changed(kept: _Kept) -> bool:
    """Whether a tensor is no more what it was; where its version says nothing, its numbers do."""
    tensor = kept.tensor
    if tensor.is_inference() or tensor._version != kept.version:
        return True
    comparable = tensor.layout == torch.strided and not tensor.is_meta
    return comparable and not torch.equal(tensor, kept.copy)
