"""Parts of a module: its head, as names and as a layer; the rest, its encoder; and what its user keeps or shares."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.drop_in.client.tracing import Trace, in_parametrization
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.names import did_you_mean

_log = logging.getLogger(__name__)


class Roles:
    """Gives the names of a module the roles that methods speak of: ``encoder.*`` and ``head.*``.

    Args:
        head: Names of the parameters and buffers of the head; none where the module has no head.
    """

    def __init__(self, head: Iterable[str]) -> None:
        self.head = frozenset(head)

    def __bool__(self) -> bool:
        return bool(self.head)

    def of(self, name: str) -> str:
        """The name with its role in front, such as ``head.classifier.weight``."""
        return f"{'head' if name in self.head else 'encoder'}.{name}"


def find_roles(module: nn.Module, head: str | Sequence[str]) -> Roles:
    """Say which part of a module is its head.

    Args:
        module: The module.
        head: Names or patterns of layers or parameters (``"classifier"``, ``"fc.*"``).

    Raises:
        ConfigurationError: As :func:`named_part`, or the patterns fit everything.
    """
    roles = Roles(named_part(module, "head", head))
    if roles and _is_everything(module, roles.head):
        raise ConfigurationError(
            f"head={head!r} matches all parameters of {_name(module)}, so none is left for the encoder: name only "
            "the last layers"
        )
    return roles


def chosen_parts(
    module: nn.Module, personal: str | Sequence[str], shared: str | Sequence[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Names of the tensors that the user keeps on each client, and of those that the user lets travel.

    Args:
        module: The module.
        personal: The option of :func:`~pfl_lightning.drop_in.federate.federate`.
        shared: The other.

    Raises:
        ConfigurationError: As :func:`named_part`; a tensor is in both, or a shared buffer has no finite values.
    """
    stays, travels = named_part(module, "personal", personal), named_part(module, "shared", shared)
    both = sorted(stays & travels)
    if both:
        raise ConfigurationError(
            f"personal={personal!r} and shared={shared!r} both name {both[0]} of {_name(module)}: make one narrower"
        )
    unset = [n for n, b in module.named_buffers() if n in travels and not bool(b.isfinite().all())]
    if unset:
        raise ConfigurationError(
            f"shared={shared!r} names {unset[0]} of {_name(module)}, whose initial values are not finite and have no "
            "mean: set finite ones, or leave it on the clients"
        )
    return stays, travels


def named_part(module: nn.Module, option: str, patterns: str | Sequence[str]) -> frozenset[str]:
    """Names in a module's state that fit one of the patterns, each of which names layers, parameters or buffers.

    Args:
        module: The module.
        option: Name of the option that the patterns are given by.
        patterns: Names or patterns.

    Raises:
        ConfigurationError: A pattern fits nothing, or one of two names of a tensor.
    """
    names, found = list(plain_state(module)) if patterns else [], set[str]()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fitting = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not fitting:
            parts = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
            raise ConfigurationError(
                f"{option}={pattern!r} matches no parameter or persistent buffer"
                f"{did_you_mean(pattern.rstrip('*.'), sorted(parts))}; there are {names}"
            )
        found |= fitting
    tied = _tied_across(module, found)
    if tied is not None:
        raise ConfigurationError(
            f"{tied[0]} and {tied[1]} are one parameter of {_name(module)} (tied weights), and {option}={patterns!r} "
            "names only one of them: name both or none"
        )
    return frozenset(found)


def _is_everything(module: nn.Module, names: Iterable[str]) -> bool:
    return {*names}.issuperset(name for name, _ in module.named_parameters())


def traced_head(module: nn.Module, trace: Trace, method: str) -> Roles:
    """The one last layer that the loss of a traced batch depends on.

    Args:
        module: The module.
        trace: What the batch has shown.
        method: Name of the method that needs a head, for messages.

    Raises:
        ConfigurationError: It is not known which layer that is, or it cannot be set apart. Its cause is what ended the
            step, if anything did.
    """
    layers = (*trace.last, *trace.norms)  # or parameters of the module itself
    found = [n for n in plain_state(module) if n in layers or n.startswith(tuple(f"{layer}." for layer in layers))]
    problem = trace.problem
    if problem is None and len(trace.last) != 1:
        problem = f"it depends on {len(trace.last)} last layers at once"
    elif problem is None and (not found or _is_everything(module, found)):
        problem = f"{trace.last[0]!r} has all parameters of the module"
    elif problem is None:
        tied = _tied_across(module, found)
        problem = None if tied is None else f"{tied[0]} and {tied[1]} are one parameter (tied weights)"
    if problem is not None:
        linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and name]
        near = dict.fromkeys([*trace.last, *trace.called[-3:], *linear[-3:]])
        rest = {name: [n for n, _ in module.named_parameters() if not f"{n}.".startswith(f"{name}.")] for name in near}
        candidates = ", ".join(repr(name) for name, others in rest.items() if others) or "none"
        raise ConfigurationError(
            f"{method} needs the head of {_name(module)}, but the loss of a traced batch does not show "
            f"which layer it is: {problem}. Set head= (candidates: {candidates}), or use a method without a head, "
            "such as FedAvg"
        ) from trace.error
    _log.warning(
        "head of %s: %r, the only last layer that the loss of a traced batch depends on (%s); set head= for another",
        _name(module),
        trace.last[0],
        ", ".join(found),
    )
    return Roles(found)


def _tied_across(module: nn.Module, part: Iterable[str]) -> tuple[str, str] | None:
    """Two names of one tensor, of which one belongs to a part of the module."""
    own, seen = set(part), dict[int, str]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = seen.setdefault(id(parameter), name)
        if (name in own) != (other in own):
            return other, name
    return None


def _name(module: nn.Module) -> str:
    return type(module).__name__


# ---------------------------------------------------------------------- the head as a layer

Shape = tuple[int, ...] | None


def head_layer(module: nn.Module, roles: Roles) -> str:
    """Name of the innermost layer that has the head's parameters and buffers, and no others.

    Raises:
        ConfigurationError: The head is not one layer.
    """
    fitting = [
        name
        for name, layer in module.named_modules(remove_duplicate=False)
        if name and not in_parametrization(name) and {f"{name}.{own}" for own in layer.state_dict()} == roles.head
    ]
    if not fitting:
        raise ConfigurationError(
            f"a method on features needs a head that is one layer of {type(module).__name__} (such as nn.Linear, or "
            f"nn.Sequential with one): head= has {', '.join(sorted(roles.head)) or 'nothing'}"
        )
    innermost: str = max(fitting, key=len)
    return innermost


def widths_of_head(head: nn.Module, entering: Shape = None, leaving: Shape = None) -> tuple[int | None, int | None]:
    """Numbers that enter a head for each sample, and scores that it gives; ``None`` where nothing tells them.

    Args:
        head: The head.
        entering: Shape of what entered it in a traced batch, for other layers than linear ones.
        leaving: Shape of what it gave there.
    """
    # Layers with a weight (out, in), of whatever class: of a graph library, normalized, parametrized, adapted.
    named = [layer for name, layer in head.named_modules() if not in_parametrization(name)]
    found = [layer for layer in named if getattr(getattr(layer, "weight", None), "ndim", 0) == 2] or [head]
    first, last = found[0], found[-1]
    return (
        first.in_features if isinstance(first, nn.Linear) else width_of(entering),
        last.out_features if isinstance(last, nn.Linear) else width_of(leaving),
    )


def is_linear(head: nn.Module) -> bool:
    """Whether all of a head's layers with parameters are torch's own linear ones."""
    own = [layer for layer in head.modules() if next(layer.parameters(recurse=False), None) is not None]
    return all(isinstance(layer, nn.Linear) for layer in own)


def width_of(shape: Shape) -> int | None:
    """Number of features of each sample, where all further dimensions are 1."""
    if shape is None or len(shape) < 2 or any(size != 1 for size in shape[2:]):
        return None
    return shape[1]


def renew(head: nn.Module, name: str) -> None:
    """Give a head new random values, as when its layers were made.

    Raises:
        ConfigurationError: A layer with parameters does not say how.
    """
    for layer in head.modules():
        reset: Any = getattr(layer, "reset_parameters", None)
        if reset is not None:
            reset()
        elif next(layer.parameters(recurse=False), None) is not None:
            raise ConfigurationError(
                f"personalize.train 'linear' starts with a new head, and {type(layer).__name__} at {name!r} has no "
                "reset_parameters that would make it new: use 'head', which starts from the trained one"
            )
