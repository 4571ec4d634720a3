"""What travels between the server and its clients, and nothing else does.

A message is a frozen dataclass of tensors with named fields. A method that sends more than weights adds fields in a
subclass, each declared with its kind (:func:`weight_field` or :func:`statistics_field`), so that the traffic can be
counted by kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from pfl_lightning.errors import InvalidMessageError

__all__ = ["Broadcast", "ClientUpdate", "Message", "State", "statistics_field", "weight_field"]

State = Mapping[str, Tensor]
"""A named part of a model's state: parameter or buffer names to tensors."""

WEIGHTS = "weights"
STATISTICS = "statistics"


def weight_field(**kwargs: Any) -> Any:
    """Declare a message field that holds model weights (a tensor, or a :data:`State`)."""
    return field(metadata={"kind": WEIGHTS}, **kwargs)


def statistics_field(**kwargs: Any) -> Any:
    """Declare a message field that holds statistics of a client's data or features (a tensor, or names to tensors)."""
    return field(metadata={"kind": STATISTICS}, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of :class:`Broadcast` and :class:`ClientUpdate`.

    Attributes:
        client: The client that receives or sends the message.
        round: The round, from 0.
    """

    client: int
    round: int

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Walk over the content as ``(field.name, kind, tensor)``."""
        for declared in fields(self):
            kind = declared.metadata.get("kind")
            if kind is None:
                continue
            value = getattr(self, declared.name)
            if isinstance(value, Tensor):
                yield declared.name, kind, value
            elif value is not None:
                for name, tensor in value.items():
                    yield f"{declared.name}.{name}", kind, tensor

    def to(self, device: torch.device) -> Self:
        """The message with its content on a device; itself if all of it is there."""
        if all(tensor.device == device for _, _, tensor in self.tensors()):
            return self
        return self.with_tensors(lambda tensor: tensor.to(device))

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The message with every tensor of its content changed."""
        changed: dict[str, Any] = {}
        for declared in fields(self):
            value = getattr(self, declared.name)
            if declared.metadata.get("kind") is not None and value is not None:
                whole = isinstance(value, Tensor)
                changed[declared.name] = change(value) if whole else {n: change(t) for n, t in value.items()}
        return replace(self, **changed)

    def bytes_by_kind(self) -> dict[str, int]:
        """Size of the content in bytes, by kind (``"weights"``, ``"statistics"``).

        Tensors alone count; the few integers of the envelope (client, round, number of samples) do not.
        """
        sizes: dict[str, int] = {}
        for _, kind, tensor in self.tensors():
            sizes[kind] = sizes.get(kind, 0) + tensor.numel() * tensor.element_size()
        return sizes

    @property
    def num_bytes(self) -> int:
        """Size of the content in bytes."""
        return sum(self.bytes_by_kind().values())

    def check_finite(self) -> None:
        """Refuse NaN and infinity.

        Raises:
            InvalidMessageError: Names the client, the round and the field.
        """
        for name, _, tensor in self.tensors():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                count = int((~torch.isfinite(tensor)).sum())
                raise InvalidMessageError(
                    self.client,
                    self.round,
                    f"{type(self).__name__}.{name} holds {count} non-finite values of {tensor.numel()}; "
                    "lower the learning rate, clip the gradient, or look at this client's data",
                )

    def check_like(self, name: str, got: State, expected: State) -> None:
        """Refuse a state whose names or shapes differ from what is expected.

        Raises:
            InvalidMessageError: Names the client, the round, the field and the first difference.
        """
        missing, surplus = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
        if missing or surplus:
            raise InvalidMessageError(
                self.client, self.round, f"{type(self).__name__}.{name}: missing {missing}, unexpected {surplus}"
            )
        for key, tensor in expected.items():
            if got[key].shape != tensor.shape:
                raise InvalidMessageError(
                    self.client,
                    self.round,
                    f"{type(self).__name__}.{name}[{key!r}] has shape {tuple(got[key].shape)}, "
                    f"expected {tuple(tensor.shape)}",
                )

    def check_shape(self, name: str, got: Tensor, *expected: int) -> None:
        """Refuse a tensor of another shape than ``expected``.

        Raises:
            InvalidMessageError: Names the client, the round, the field and both shapes.
        """
        if tuple(got.shape) != expected:
            raise InvalidMessageError(
                self.client,
                self.round,
                f"{type(self).__name__}.{name} has shape {tuple(got.shape)}, expected {expected}",
            )


@dataclass(frozen=True, kw_only=True)
class Broadcast(Message):
    """What a client receives from the server at the start of a round.

    Its tensors may be the server's own: a client copies what it wants to change (``load_state`` does).

    Attributes:
        weights: The client's shared state; empty when nothing is shared.
    """

    weights: State = weight_field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClientUpdate(Message):
    """What a client uploads after its local fit.

    Attributes:
        num_samples: Number of the client's training samples, n_k.
        weights: The client's shared state after the local fit; empty when nothing is shared.
    """

    num_samples: int
    weights: State = weight_field(default_factory=dict)

    def check_size(self) -> None:
        """Refuse an update without samples, which has no weight in any mean.

        Raises:
            InvalidMessageError: Names the client, the round and the number.
        """
        if self.num_samples < 1:
            raise InvalidMessageError(
                self.client, self.round, f"num_samples is {self.num_samples}, expected at least 1"
            )
