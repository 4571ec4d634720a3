"""Messages between the server and its clients; nothing else travels.

A message is a frozen dataclass of tensors with named fields. A method that sends more than weights adds fields in a
subclass, each declared by :func:`weight_field` or :func:`statistics_field`: the kind, by which the traffic is counted,
and what the content must be like, which :meth:`Message.check_content` checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from pfl_lightning.errors import InvalidMessageError

__all__ = ["Broadcast", "ClientUpdate", "FieldSchema", "Message", "State", "statistics_field", "weight_field"]

State = Mapping[str, Tensor]
"""A named part of a model's state: parameter or buffer names to tensors."""

WEIGHTS = "weights"
STATISTICS = "statistics"


@dataclass(frozen=True)
class FieldSchema:
    """Declaration of a message field: a tensor, or names to tensors.

    Attributes:
        kind: ``"weights"`` or ``"statistics"``; the traffic is counted by kind.
        shape: Sizes of a tensor, separated by spaces: numbers, or symbols that stand for one size within a message.
            ``"C d"`` is a row of features for each class; C (number of classes), d (width of the features) and m
            (number of clients) are the federation's, other symbols are free. ``""`` is a scalar, ``None`` any shape.
        dtype: Type of the numbers; ``None`` for any.
        when: Name of an attribute of the server. While it is true the field must be given, otherwise it must be
            ``None``. A field without it must be given unless it has a default.
        at_least: Smallest number allowed; ``None`` for no bound.
        below: Symbol of a size which all numbers are smaller than; ``None`` for no bound.
        ascending: Whether there is at least one number, and each is larger than the one before.
    """

    kind: str
    shape: str | None = None
    dtype: torch.dtype | None = None
    when: str | None = None
    at_least: float | None = None
    below: str | None = None
    ascending: bool = False

    def range_error(self, value: Tensor, sizes: Mapping[str, int]) -> str | None:
        """Expected range of the numbers; ``None`` if ``value``, finite, lies in it."""
        if self.at_least is None and self.below is None and not self.ascending:
            return None
        least = -math.inf if self.at_least is None else self.at_least
        limit = math.inf if self.below is None else sizes[self.below]
        good = bool((value >= least).all()) and bool((value < limit).all())
        if self.ascending:
            good = good and value.numel() > 0 and bool((value[1:] > value[:-1]).all())
        if good:
            return None
        bounds = [f"at least {least:g}"] * (least > -math.inf) + [f"below {limit}"] * (limit < math.inf)
        return ", ".join([*["ascending numbers"] * self.ascending, *bounds])


def weight_field(**options: Any) -> Any:
    """Declare a message field that holds model weights.

    Args:
        options: Attributes of :class:`FieldSchema`; the others are arguments of ``dataclasses.field``.
    """
    return _declared(WEIGHTS, options)


def statistics_field(**options: Any) -> Any:
    """Declare a message field that holds statistics of a client's data or features.

    Args:
        options: Attributes of :class:`FieldSchema`; the others are arguments of ``dataclasses.field``.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class MeansUpdate(ClientUpdate):
        ...     means: Tensor = statistics_field(shape="K d")
        ...     counts: Tensor = statistics_field(shape="K", dtype=torch.int64, at_least=1)
        ...     variance: Tensor | None = statistics_field(shape="", at_least=0, when="uses_variance")
    """
    return _declared(STATISTICS, options)


def _declared(kind: str, options: dict[str, Any]) -> Any:
    own = {name: options.pop(name) for name in FieldSchema.__dataclass_fields__ if name in options}
    if "when" in own:
        options.setdefault("default", None)
    return field(metadata={"schema": FieldSchema(kind, **own)}, **options)


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
            schema = declared.metadata.get("schema")
            if schema is None:
                continue
            value = getattr(self, declared.name)
            if isinstance(value, Tensor):
                yield declared.name, schema.kind, value
            elif value is not None:
                for name, tensor in value.items():
                    yield f"{declared.name}.{name}", schema.kind, tensor

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
            if "schema" in declared.metadata and value is not None:
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

    # ------------------------------------------------------------------ checks

    def refuse(self, reason: str) -> NoReturn:
        """Raise an :class:`~pfl_lightning.errors.InvalidMessageError` that names the client and the round."""
        raise InvalidMessageError(self.client, self.round, reason)

    def check_content(self, sizes: Mapping[str, int], holds: Callable[[str], bool]) -> None:
        """Refuse content that differs from the fields' declarations: every tensor is read once.

        Args:
            sizes: What the symbols of shapes stand for, as far as known.
            holds: Tells of a declared condition (:attr:`FieldSchema.when`) whether it is true.

        Raises:
            InvalidMessageError: Names the client, the round, the field, what was expected and what came.
        """
        sizes = dict(sizes)  # free symbols join in this message alone
        for declared in fields(self):
            schema = declared.metadata.get("schema")
            if schema is None:
                continue
            name, value = f"{type(self).__name__}.{declared.name}", getattr(self, declared.name)
            if schema.when is not None:
                expected = holds(schema.when)
            else:
                expected = value is not None or (declared.default is MISSING and declared.default_factory is MISSING)
            if expected != (value is not None):
                self.refuse(f"{name} is {'missing' if expected else 'not expected'}")
            if isinstance(value, Tensor):
                self._check_tensor(name, value, schema, sizes)
            elif value is not None:
                for key, tensor in value.items():
                    self._check_finite(f"{name}.{key}", tensor)

    def _check_tensor(self, name: str, value: Tensor, schema: FieldSchema, sizes: dict[str, int]) -> None:
        if schema.shape is not None:
            got, symbols = tuple(value.shape), schema.shape.split()
            if len(got) == len(symbols):
                for symbol, size in zip(symbols, got, strict=True):
                    sizes.setdefault(symbol, int(symbol) if symbol.isdecimal() else size)
            expected = tuple(sizes.get(symbol, symbol) for symbol in symbols)
            if got != expected:
                self.refuse(f"{name} has shape {got}, expected {str(expected).replace(chr(39), '')}")
        if schema.dtype is not None and value.dtype != schema.dtype:
            self.refuse(f"{name} has dtype {value.dtype}, expected {schema.dtype}")
        self._check_finite(name, value)
        wanted = schema.range_error(value, sizes)
        if wanted is not None:
            shown = value.tolist() if value.numel() <= 20 else f"from {value.min().item()} to {value.max().item()}"
            self.refuse(f"{name} is {shown}, expected {wanted}")

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            self.refuse(
                f"{name} holds {count} non-finite values of {tensor.numel()}; "
                "lower the learning rate, clip the gradient, or look at this client's data"
            )


@dataclass(frozen=True, kw_only=True)
class Broadcast(Message):
    """Message from the server to a client at the start of a round.

    Its tensors may be the server's own: a client copies what it wants to change (``load_state`` does).

    Attributes:
        weights: The client's shared state; empty when nothing is shared.
    """

    weights: State = weight_field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClientUpdate(Message):
    """Message from a client to the server after its local fit.

    Attributes:
        num_samples: Number of the client's training samples, n_k.
        weights: The client's shared state after the local fit; empty when nothing is shared.
    """

    num_samples: int
    weights: State = weight_field(default_factory=dict)
