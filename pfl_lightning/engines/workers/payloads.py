"""Payloads for workers, in which tensors common to several payloads are sent once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.engines.workers.packing import Packed, Place, pack
from pfl_lightning.engines.workers.worker import ClientWork, Payload
from pfl_lightning.messages import Broadcast

__all__ = ["HostCopies", "PayloadBuilder"]

WORTH_SHARING = 65_536
"""Bytes from which common tensors go into a bundle; fewer are sent in the payload."""


class PayloadBuilder:
    """Builder of the payloads of one round, or of one evaluation.

    Tensors that the server sends to all clients, and fixed ones, are the same objects in every task. From the second
    payload on they are held as a bundle, which every worker gets once. Tensors are recognized by identity and must not
    change while payloads are made: every round has a new builder.

    Args:
        put: Function that stores an object where workers can read it and returns its reference.
        numbers: Numbers of the bundles. Workers keep bundles by number from round to round, so that a number must not
            be used twice while they live.
    """

    def __init__(self, put: Callable[[Packed], Any], numbers: Iterator[int]) -> None:
        self._put, self._numbers = put, numbers
        self._last: dict[int, dict[int, Tensor]] = {}  # by architecture: the tensors of its last payload, by id
        self._places: dict[int, Place] = {}
        self._bundles: dict[int, tuple[Any, list[Tensor]]] = {}
        self.num_bytes = 0

    def make(self, work: Sequence[ClientWork]) -> Payload:
        """Payload of some clients."""
        own: dict[int, Tensor] = {}
        for piece in work:
            tensors = _tensors_of(piece)
            self._bundle(piece.model, tensors)
            own |= tensors
            self._last[piece.model] = tensors
        content = pack(tuple(work), self._places)
        self.num_bytes += content.num_bytes
        used = sorted({self._places[key][0] for key in own if key in self._places})
        bundles = tuple((number, self._bundles[number][0]) for number in used)
        return Payload(content, bundles, frozenset(self._bundles))

    def _bundle(self, model: int, tensors: Mapping[int, Tensor]) -> None:
        before = self._last.get(model, {})
        common = [tensor for key, tensor in tensors.items() if key in before and key not in self._places]
        if sum(tensor.numel() * tensor.element_size() for tensor in common) < WORTH_SHARING:
            return
        number = next(self._numbers)
        packed = pack(common)
        self.num_bytes += packed.num_bytes
        self._bundles[number] = (self._put(packed), common)  # held, so that no other tensor gets one of the ids
        self._places |= {id(tensor): (number, position) for position, tensor in enumerate(common)}


class HostCopies:
    """Broadcasts in host memory; tensors common to consecutive broadcasts are copied once and stay common."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the tensor, held so that its id stays, and its copy

    def of(self, message: Broadcast) -> Broadcast:
        """Broadcast with its tensors on the CPU."""
        tensors = [tensor for _, _, tensor in message.tensors()]
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return message
        self._last = {id(tensor): self._last.get(id(tensor)) or (tensor, tensor.cpu()) for tensor in tensors}
        return message.with_tensors(lambda tensor: self._last[id(tensor)][1])


def _tensors_of(work: ClientWork) -> dict[int, Tensor]:
    """Tensors of a client's work by id, in a fixed order."""
    found = [tensor for _, _, tensor in work.broadcast.tensors()] + list(work.state.values())
    return {id(tensor): tensor for tensor in found if type(tensor) is torch.Tensor}
