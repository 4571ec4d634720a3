"""Which parameters of a module are its head; the others are its encoder."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.drop_in.client.tracing import Trace
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.names import did_you_mean

__all__ = ["Roles", "check_layers", "find_roles", "fitting_names", "likely_head", "tied_across", "traced_head"]

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
        ConfigurationError: A pattern fits nothing, the patterns fit everything, or a parameter is in both parts.
    """
    check_layers(module)
    names = list(plain_state(module))
    roles = Roles(fitting_names(names, [head] if isinstance(head, str) else head, "head"))
    if roles and _is_everything(module, roles.head):
        raise ConfigurationError(
            f"head={head!r} fits all parameters of {_name(module)}, so that none is left for the encoder: name the "
            f"last layers alone; there are {names}"
        )
    tied = tied_across(module, roles.head)
    if tied is not None:
        raise ConfigurationError(
            f"{tied[0]} and {tied[1]} are one parameter of {_name(module)} (tied weights), and only one of the names "
            "is of the head: a client cannot keep the one and share the other; name both or none in head="
        )
    return roles


def check_layers(module: nn.Module) -> None:
    """Refuse a module without layers.

    Raises:
        ConfigurationError: It has no parameters and buffers.
    """
    if not plain_state(module):
        raise ConfigurationError(
            f"{type(module).__name__} has no parameters: where setup or configure_model makes its layers, call it "
            "before the module is federated"
        )


def fitting_names(
    names: Sequence[str], patterns: Sequence[str], option: str, not_saved: Sequence[str] = ()
) -> list[str]:
    """Names that fit one of the patterns, each of which names layers, parameters or buffers.

    Args:
        names: Names in the module's state.
        patterns: Names or patterns.
        option: Name of the option that they are given by.
        not_saved: Names of non-persistent buffers.

    Raises:
        ConfigurationError: A pattern fits nothing.
    """
    found: list[str] = []
    for pattern in patterns:
        fitting = [name for name in names if _fits(name, pattern)]
        if not fitting:
            raise ConfigurationError(
                f"{option}={pattern!r} fits no parameter or buffer{_hint(pattern, names, not_saved)}"
            )
        found += fitting
    return found


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _hint(pattern: str, names: Sequence[str], not_saved: Sequence[str]) -> str:
    scratch = [name for name in not_saved if _fits(name, pattern)]
    if scratch:
        return f" that is saved: {scratch[0]} is a non-persistent buffer, register it with persistent=True"
    parts = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
    return f"{did_you_mean(pattern.rstrip('*.'), sorted(parts))}; there are {list(names)}"


def _is_everything(module: nn.Module, names: Iterable[str]) -> bool:
    own = set(names)
    return all(name in own for name, _ in module.named_parameters())


def _parameters_below(module: nn.Module, name: str) -> list[str]:
    """Names of the parameters of a layer, or of one by its own name."""
    return [own for own, _ in module.named_parameters() if own == name or own.startswith(f"{name}.")]


def likely_head(module: nn.Module) -> Roles:
    """The last linear layer in the order in which layers are declared: where it is not known which is called last."""
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and name]
    found = [name for name in plain_state(module) if linear and name.startswith(f"{linear[-1]}.")]
    return Roles([] if not found or _is_everything(module, found) or tied_across(module, found) else found)


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
    if problem is None and not trace.is_sure:
        problem = f"it depends on {len(trace.last)} last layers at once"
    elif problem is None and (not found or _is_everything(module, found)):
        problem = f"{trace.last[0]!r} has all parameters of the module"
    elif problem is None:
        tied = tied_across(module, found)
        problem = None if tied is None else f"{tied[0]} and {tied[1]} are one parameter (tied weights)"
    if problem is not None:
        linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and name]
        near = dict.fromkeys([*trace.last, *trace.called[-3:], *linear[-3:]])
        candidates = [name for name in near if not _is_everything(module, _parameters_below(module, name))]
        how = f"Name it by head=; candidates are {', '.join(map(repr, candidates))}"
        if trace.error is not None:
            how = f"The traceback above has the cause. If the step fails in this trial alone: {how}"
        raise ConfigurationError(
            f"{method} sets the head of {_name(module)} apart, and the loss of a traced batch does not tell which "
            f"layer that is: {problem}. "
            + (how if candidates else "No layer stands before it: take a method without a head, such as FedAvg")
        ) from trace.error
    _log.warning(
        "head of %s: %r, the one last layer that the loss of a traced batch depends on (%s); head= names another",
        _name(module),
        trace.last[0],
        ", ".join(found),
    )
    return Roles(found)


def tied_across(module: nn.Module, part: Iterable[str]) -> tuple[str, str] | None:
    """Two names of one tensor, of which one belongs to a part of the module."""
    own, seen = set(part), dict[int, str]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = seen.setdefault(id(parameter), name)
        if (name in own) != (other in own):
            return other, name
    return None


def _name(module: nn.Module) -> str:
    return type(module).__name__
