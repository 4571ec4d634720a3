"""Messages between the server and its clients; nothing else travels.

A message is a frozen dataclass of tensors with named fields. A method that sends more than weights adds fields in a
subclass, each declared by :func:`weight_field` or :func:`statistics_field`: the kind, by which the traffic is counted,
and what the content must be like, which :meth:`Message.check_content` checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from inspect import signature
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor

from pfl_lightning.errors import InvalidMessageError
from pfl_lightning.functional.tensor_lists import HOST, magnitudes, moved, unusual_kind

__all__ = ["LARGEST", "TELLS", "Broadcast", "ClientUpdate", "FieldSchema", "Message", "State", "magnitude"]
__all__ += ["statistics_field", "weight_field"]

State = Mapping[str, Tensor]
"""A named part of a model's state: parameter or buffer names to tensors."""

TELLS = (
    *("weights", "class counts", "label presence", "class means", "class sums", "class covariances", "class scores"),
    *("feature mean", "feature variance", "feature products", "public scores"),
    *("amount of work", "quality of fit", "choice"),
)
"""What fields of updates may tell: trained weights or their change; per class the number of samples, whether there are
any, the mean, the sum, the covariance and the mean scores; mean, variance and products of all features; scores of
public samples; how much was computed; how well models fit; which of several models was chosen."""

WEIGHTS = "weights"
STATISTICS = "statistics"

LARGEST = 1e12
"""Numbers beyond it, positive or negative, are refused like NaN, and so are numbers of samples: no training that goes
well comes near it, and sums of squares of smaller numbers are finite in single precision."""


def magnitude(tensor: Tensor) -> float:
    """Largest absolute value of a dense tensor; NaN if there is one, and 0 without any number.

    Example:
        >>> import torch
        >>> from pfl_lightning.messages import magnitude
        >>> magnitude(torch.tensor([1.0, -3.0])), magnitude(torch.tensor([float("nan"), 1.0])), magnitude(torch.ones(0))
        (3.0, nan, 0.0)
    """
    return magnitudes([tensor])[0]


def is_covariance(value: Tensor) -> bool:
    """Return whether matrices (..., d, d) are symmetric and have no negative eigenvalue, up to rounding.

    Example:
        >>> [is_covariance(torch.tensor(rows)) for rows in ([[2.0, 1], [1, 2]], [[1.0, 2], [2, 1]], [[1.0, 1], [0, 1]])]
        [True, False, False]
    """
    own = value.detach().to("cpu", torch.float64)
    rounding = 10 * own.shape[-1] * torch.finfo(value.dtype).eps * magnitude(own)
    return magnitude(own - own.mT) <= rounding and bool((torch.linalg.eigvalsh(own) >= -rounding).all())


@dataclass(frozen=True)
class FieldSchema:
    """Declaration of a message field: a tensor, or names to tensors.

    Attributes:
        kind: ``"weights"`` or ``"statistics"``; the traffic is counted by kind.
        shape: Sizes of a tensor, separated by spaces: numbers, or symbols that stand for one size within a message.
            ``"C d"`` is a row of features for each class; C (number of classes), d (width of the features) and m
            (number of clients) are the federation's, other symbols are free. ``""`` is a scalar, ``None`` any shape.
        dtype: Type of the numbers; ``None`` for any.
        floating: Whether the numbers must be of a floating-point type, whichever.
        when: Name of an attribute of the server. While it is true the field must be given, otherwise it must be
            ``None``. A field without it must be given unless it has a default.
        at_least: Smallest number allowed; ``None`` for no bound.
        below: Symbol of a size which all numbers are smaller than; ``None`` for no bound.
        ascending: Whether there is at least one number, and each is larger than the one before.
        total: Name of an attribute of the message which the numbers add up to at most, such as ``"num_samples"`` for
            class counts; ``None`` for no bound.
        covariance: Whether the last two axes are of a covariance: symmetric, without negative eigenvalues.
        tells: What the content tells of a client's data, one of :data:`TELLS`. The pages of methods say it, and
            :class:`~pfl_lightning.privacy.ClientPrivacy` goes by it; what it does not know, it refuses.
    """

    kind: str
    shape: str | None = None
    dtype: torch.dtype | None = None
    floating: bool = False
    when: str | None = None
    at_least: float | None = None
    below: str | None = None
    ascending: bool = False
    total: str | None = None
    covariance: bool = False
    tells: str | None = None

    def __post_init__(self) -> None:
        """Refuse values of another kind, which would show at the first message alone.

        Raises:
            TypeError: Says the option.
        """
        for name in ("shape", "when", "below", "total", "tells"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"{name} of a message field must be a string, got {getattr(self, name)!r}")
        if not isinstance(self.at_least, int | float | None):
            raise TypeError(f"at_least of a message field must be a number, got {self.at_least!r}")

    def range_error(self, value: Tensor, sizes: Mapping[str, int]) -> str | None:
        """Expected range of the numbers; ``None`` if ``value``, finite, lies in it."""
        least = -math.inf if self.at_least is None else self.at_least
        limit = math.inf if self.below is None else sizes[self.below]
        good = bool((value >= least).all()) and bool((value < limit).all())
        if self.ascending:
            good = good and value.numel() > 0 and bool((value[1:] > value[:-1]).all())
        if self.covariance and not is_covariance(value):
            return "a covariance: a symmetric matrix without negative eigenvalues"
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
    if unknown := options.keys() - signature(field).parameters.keys():
        known = ", ".join(name for name in FieldSchema.__dataclass_fields__ if name != "kind")
        raise TypeError(f"a message field has no option {min(unknown)!r}: known are {known}, and those of a dataclass")
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

    scanned: ClassVar[tuple[str, ...]] = (WEIGHTS, STATISTICS)
    """Kinds of content that may hold no NaN, infinity or absurd number."""

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
            elif isinstance(value, Mapping):  # what else there is, the check refuses
                for name, tensor in value.items():
                    if isinstance(tensor, Tensor):
                        yield f"{declared.name}.{name}", schema.kind, tensor

    def to(self, device: torch.device) -> Self:
        """The message with its content on a device; itself if all of it is there."""
        own = [tensor for _, _, tensor in self.tensors()]
        there = moved(own, device)
        arrived = iter(there)
        if all(one is other for one, other in zip(own, there, strict=True)):
            return self
        return self.with_tensors(lambda _: next(arrived))

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The message with every tensor of its content changed."""
        changed: dict[str, Any] = {}
        for declared in fields(self):
            value = getattr(self, declared.name)
            if "schema" in declared.metadata and isinstance(value, Tensor):
                changed[declared.name] = change(value)
            elif "schema" in declared.metadata and isinstance(value, Mapping):  # what else there is, the check refuses
                changed[declared.name] = {n: change(t) if isinstance(t, Tensor) else t for n, t in value.items()}
        return replace(self, **changed)

    def with_named(self, content: Mapping[str, Tensor]) -> Self:
        """The message with some of its tensors replaced, by the names that :meth:`tensors` gives them."""
        changed: dict[str, Any] = {}
        for name, tensor in content.items():
            own, _, inner = name.partition(".")
            changed[own] = {**changed.get(own, getattr(self, own)), inner: tensor} if inner else tensor
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

    def check_content(
        self, sizes: Mapping[str, int], holds: Callable[[str], bool], sent: Callable[[], Message] | None = None
    ) -> None:
        """Refuse content that differs from the fields' declarations: every tensor is read once, with one wait.

        Args:
            sizes: What the symbols of shapes stand for, as far as known.
            holds: Tells of a declared condition (:attr:`FieldSchema.when`) whether it is true.
            sent: Gives the message that this one answers. What it holds itself beyond :data:`LARGEST`, such as the mask
                of an attention, may come back.

        Raises:
            InvalidMessageError: Names the client, the round, the field, what was expected and what came.
        """
        sizes = dict(sizes)  # free symbols join in this message alone
        dense = [one for _, kind, one in self.tensors() if kind in self.scanned and unusual_kind(one) is None]
        largest = dict(zip(map(id, dense), magnitudes(dense), strict=True))
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
            if schema.shape is not None and isinstance(value, Tensor):
                self._check_shape(name, value, schema.shape, sizes)
            if value is not None and schema.below is not None and schema.below not in sizes:
                self.refuse(f"{name} is declared with below={schema.below!r}, a size that no field before it has")
            if schema.total is not None and not hasattr(self, schema.total):
                self.refuse(f"{name} is declared with total={schema.total!r}, which the message does not have")
            if isinstance(value, Mapping):
                for key, tensor in value.items():
                    self._check_tensor(f"{name}.{key}", tensor, schema, sizes, sent, largest)
            elif value is not None:
                self._check_tensor(name, value, schema, sizes, sent, largest)

    def _check_shape(self, name: str, value: Tensor, shape: str, sizes: dict[str, int]) -> None:
        got, symbols = tuple(value.shape), shape.split()
        if len(got) == len(symbols):
            for symbol, size in zip(symbols, got, strict=True):
                sizes.setdefault(symbol, int(symbol) if symbol.isdecimal() else size)
        expected = tuple(sizes.get(symbol, symbol) for symbol in symbols)
        if got != expected:
            self.refuse(f"{name} has shape {got}, expected {str(expected).replace(chr(39), '')}")

    def _check_tensor(
        self,
        name: str,
        value: Any,
        schema: FieldSchema,
        sizes: Mapping[str, int],
        sent: Callable[[], Message] | None,
        largest: Mapping[int, float],
    ) -> None:
        if not isinstance(value, Tensor):
            self.refuse(f"{name} is a {type(value).__name__}, expected a tensor")
        kind = unusual_kind(value)
        if kind is not None:
            self.refuse(f"{name} is a tensor of the kind {kind}, expected a dense one; send tensor.to_dense()")
        if schema.dtype is not None and value.dtype != schema.dtype:
            self.refuse(f"{name} has dtype {value.dtype}, expected {schema.dtype}")
        if schema.floating and not value.is_floating_point():
            self.refuse(f"{name} has dtype {value.dtype}, expected a floating-point one")
        if not largest.get(id(value), 0.0) <= LARGEST:
            self._refuse_unless_sent(name, value, sent)
        if (schema.at_least, schema.below, schema.total) == (None,) * 3 and not schema.ascending | schema.covariance:
            return
        value = value.to(HOST)  # all that is to be known of it, by one copy
        wanted = schema.range_error(value, sizes)
        if (
            wanted is None
            and schema.total is not None
            and float(value.cpu().double().sum()) > getattr(self, schema.total)
        ):
            wanted = f"numbers that add up to {schema.total}, {getattr(self, schema.total)}, at most"
        if wanted is not None:
            shown = value.tolist() if value.numel() <= 20 else f"from {value.min().item()} to {value.max().item()}"
            self.refuse(f"{name} is {shown}, expected {wanted}")

    def _refuse_unless_sent(self, name: str, value: Tensor, sent: Callable[[], Message] | None) -> None:
        """Refuse NaN, infinity, and numbers beyond :data:`LARGEST`; not where the server sent such numbers itself."""
        remedy = "lower the learning rate, clip the gradient, or look at this client's data"
        if isinstance(self, Broadcast):
            remedy = "look at how the server's aggregate() computes it"
        count = int((~torch.isfinite(value)).sum())
        if count:
            self.refuse(f"{name} holds {count} non-finite values of {value.numel()}; {remedy}")
        own = name.partition(".")[2]
        before = {} if sent is None else {name: tensor for name, _, tensor in sent().tensors()}
        if own not in before or not magnitude(value) <= 1e3 * magnitude(before[own]):
            self.refuse(
                f"{name} holds values of up to {magnitude(value):.1e}, expected at most {LARGEST:.0e}; {remedy}"
            )


@dataclass(frozen=True, kw_only=True)
class Broadcast(Message):
    """Message from the server to a client at the start of a round.

    Its tensors may be the server's own: a client copies what it wants to change (``load_state`` does). The first of a
    round is checked for all.

    Attributes:
        weights: The client's shared state; empty when nothing is shared.
    """

    scanned: ClassVar[tuple[str, ...]] = (STATISTICS,)  # weights were scanned in updates, and may be masks

    weights: State = weight_field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClientUpdate(Message):
    """Message from a client to the server after its local fit.

    Attributes:
        num_samples: Number of the client's training samples, n_k; a round refuses another one.
        weights: The client's shared state after the local fit; empty when nothing is shared.
    """

    num_samples: int
    weights: State = weight_field(default_factory=dict, tells="weights")
