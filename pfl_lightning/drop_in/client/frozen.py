"""What of a module is frozen, and copies of a module that share it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.state.equality import same

__all__ = ["chosen_names", "followers", "frozen_parameters", "shared_memory"]

UNUSED = "original_module"
"""Where peft keeps a layer of which it trains a copy; the layer itself stays as it is."""


def frozen_parameters(module: nn.Module, patterns: Sequence[str] | None = None) -> frozenset[str]:
    """Names of a module's frozen parameters, which are one for all clients.

    Args:
        module: The module.
        patterns: Which of the parameters with ``requires_grad=False``; ``None`` for all but those of a network that
            may follow another one (:func:`chosen_names`).
    """
    found = [name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad]
    return chosen_names(module, found, patterns)


def chosen_names(module: nn.Module, found: Collection[str], patterns: Sequence[str] | None) -> frozenset[str]:
    """Those names of frozen parameters and buffers that patterns name.

    Without patterns these are all but those of a *follower*: a frozen network of the form of one that trains, such as
    the teacher of BYOL, MoCo or DINO, which is a moving average of its student. It changes in local fits, though not by
    a gradient, and is treated as what trains is.

    Args:
        module: The module.
        found: Names of what is frozen.
        patterns: Names or patterns of layers or parameters; ``None`` for the rule above.

    Raises:
        ConfigurationError: A pattern fits nothing that is frozen.
    """
    if patterns is None:
        moving = tuple(f"{name}." for name in followers(module)) if found else ()
        return frozenset(name for name in found if not name.startswith(moving))
    fitting = {p: {n for n in found if fnmatchcase(n, p) or fnmatchcase(n, f"{p}.*")} for p in patterns}
    for pattern, names in fitting.items():
        if not names and found:
            raise ConfigurationError(
                f"frozen={pattern!r} fits no parameter with requires_grad=False of {type(module).__name__}; there are "
                f"{list(found)}"
            )
    return frozenset[str]().union(*fitting.values())


def shared_memory(module: nn.Module, names: Collection[str]) -> dict[int, Any]:
    """Parameters over the memory of a module's own, as a memo of ``copy.deepcopy``.

    Args:
        module: The module that is copied.
        names: Which of its parameters the copy shares; of a class of their own (quantized ones) none.
    """
    found = module.named_parameters(remove_duplicate=False) if names else ()
    return {id(p): nn.Parameter(p.detach(), False) for name, p in found if name in names and type(p) is nn.Parameter}


def followers(module: nn.Module) -> list[str]:
    """Names of frozen networks that have the layers and shapes of one that trains, and so may be its moving average."""
    trained = {name: layer for name, layer in module.named_modules() if name and _trains(layer)}
    forms: dict[tuple[Any, ...], list[str]] = {}
    for name, layer in trained.items():
        forms.setdefault(_form(layer), []).append(name)

    def follows(name: str, layer: nn.Module) -> bool:
        last = name.rpartition(".")[2]
        like = [other for other in forms.get(_form(layer), ()) if not _in_a_row(name, other)]
        if last != UNUSED and any(_may_follow(layer, trained[other]) for other in like):
            return True
        parts = [(part, child) for part, child in layer.named_children() if list(child.parameters())]
        alone = not list(layer.parameters(recurse=False))
        return alone and bool(parts) and all(follows(f"{name}.{part}", child) for part, child in parts)

    found, inside = list[str](), list[str]()
    for name, layer in module.named_modules():
        if name and name not in trained and not name.startswith(tuple(inside)) and list(layer.parameters()):
            inside.append(f"{name}.")  # the largest ones
            found += [name] if follows(name, layer) else []
    return found


def _trains(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _form(layer: nn.Module) -> tuple[Any, ...]:
    return tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())


def _in_a_row(one: str, other: str) -> bool:
    """Whether two layers are numbered parts of one: of a stack of equal layers the first ones are often frozen."""
    (first, _, number), (second, _, index) = one.rpartition("."), other.rpartition(".")
    return first == second and number.isdecimal() and index.isdecimal()


def _may_follow(frozen: nn.Module, trained: nn.Module) -> bool:
    """Whether a frozen network may be the average of one of its form; a single layer only if it has its values, too."""
    layers = [layer for layer in frozen.modules() if list(layer.parameters(recurse=False))]
    return len(layers) > 1 or all(
        same(own, other) for own, other in zip(frozen.parameters(), trained.parameters(), strict=True)
    )
