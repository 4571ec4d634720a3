"""The head of a user's module as a layer: its name, the width of what enters it, the number of its scores."""

from __future__ import annotations

from torch import nn

from pfl_lightning.drop_in.client.roles import Roles
from pfl_lightning.errors import ConfigurationError

__all__ = ["head_layer", "input_width", "number_of_scores", "renew"]


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


def renew(head: nn.Module, name: str) -> None:
    """Give a head new random values, as when its layers were made.

    Raises:
        ConfigurationError: A layer with parameters does not say how.
    """
    for place, layer in head.named_modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
        elif next(layer.parameters(recurse=False), None) is not None:
            raise ConfigurationError(
                f"personalize.train 'linear' starts with a new head, and {type(layer).__name__} at "
                f"{'.'.join(filter(None, (name, place)))!r} has no reset_parameters that would make it new: use "
                "'head', which goes on with the trained one"
            )


def _linear(head: nn.Module) -> list[nn.Linear]:
    return [layer for layer in head.modules() if isinstance(layer, nn.Linear)]
