"""The head of a user's module as a layer: its name, the width of what enters it, the number of its scores."""

from __future__ import annotations

from torch import nn

from pfl_lightning.drop_in.client.roles import Roles
from pfl_lightning.errors import ConfigurationError

__all__ = ["head_layer", "input_width", "number_of_scores"]


def head_layer(module: nn.Module, roles: Roles) -> str:
    """Name of the innermost layer that has the head's parameters and buffers, and no others.

    Raises:
        ConfigurationError: The head is not one layer.
    """
    fitting = [
        name
        for name, layer in module.named_modules(remove_duplicate=False)
        if name and {f"{name}.{own}" for own in layer.state_dict()} == roles.head
    ]
    if not fitting:
        raise ConfigurationError(
            f"a method on features takes a head that is one layer of {type(module).__name__} (nn.Linear, or "
            "nn.Sequential "
            f"with one): head= has {', '.join(sorted(roles.head)) or 'nothing'}"
        )
    innermost: str = max(fitting, key=len)
    return innermost


def input_width(head: nn.Module) -> int | None:
    """Width of what enters a head; ``None`` where it has no linear layer."""
    linear = _linear(head)
    return linear[0].in_features if linear else None


def number_of_scores(head: nn.Module) -> int | None:
    """Number of scores that a head gives; ``None`` where it has no linear layer."""
    linear = _linear(head)
    return linear[-1].out_features if linear else None


def _linear(head: nn.Module) -> list[nn.Linear]:
    return [layer for layer in head.modules() if isinstance(layer, nn.Linear)]
