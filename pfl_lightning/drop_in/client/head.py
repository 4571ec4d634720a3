"""The head of a user's module as a layer: its name, the width of what enters it, the number of its scores."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from pfl_lightning.drop_in.client.roles import Roles
from pfl_lightning.drop_in.client.tracing import in_parametrization
from pfl_lightning.errors import ConfigurationError

__all__ = ["check_scores", "head_layer", "input_width", "is_linear", "number_of_scores", "renew", "width_of"]

Shape = tuple[int, ...] | None

_TABLES = (nn.Embedding, nn.EmbeddingBag)


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
            f"a method on features takes a head that is one layer of {type(module).__name__} (such as nn.Linear, or "
            f"nn.Sequential with one): head= has {', '.join(sorted(roles.head)) or 'nothing'}"
        )
    innermost: str = max(fitting, key=len)
    return innermost


def input_width(head: nn.Module, seen: Shape = None) -> int | None:
    """Width of what enters a head; ``None`` where neither its layers nor a traced batch tell it.

    Args:
        head: The head.
        seen: Shape of what entered it in a traced batch.
    """
    first = next(iter(_linear(head)), None)
    return first.in_features if isinstance(first, nn.Linear) else width_of(seen) or _size(first, 1)


def number_of_scores(head: nn.Module, seen: Shape = None) -> int | None:
    """Number of scores that a head gives; ``None`` where neither its layers nor a traced batch tell it.

    Args:
        head: The head.
        seen: Shape of what it gave in a traced batch.
    """
    last = next(reversed(_linear(head)), None)
    return last.out_features if isinstance(last, nn.Linear) else width_of(seen) or _size(last, 0)


def is_linear(head: nn.Module) -> bool:
    """Whether all of a head's layers with parameters are torch's own linear ones."""
    own = [layer for layer in head.modules() if next(layer.parameters(recurse=False), None) is not None]
    return all(isinstance(layer, nn.Linear) for layer in own)


def width_of(shape: Shape) -> int | None:
    """Number of features of each sample, where all further dimensions are 1."""
    if shape is None or len(shape) < 2 or any(size != 1 for size in shape[2:]):
        return None
    return shape[1]


def check_scores(head: nn.Module, name: str, width: int, method: str) -> None:
    """Refuse a head that does not make scores of features alone, such as one that asks for the classes, too.

    Raises:
        ConfigurationError: It ends in an error, or gives something else.
    """
    like = next(head.parameters())
    modes = {layer: layer.training for layer in head.modules()}
    found: Any = None
    head.eval()
    try:
        with torch.no_grad(), isolate_rng():
            found = head(torch.zeros(2, width, dtype=like.dtype, device=like.device))
        problem, cause = f"gave {tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__}", None
    except Exception as error:  # whatever a user's own layer raises
        problem, cause = f"ended in {type(error).__name__}: {error}", error
    finally:
        for layer, mode in modes.items():
            layer.training = mode
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != 2:
        raise ConfigurationError(
            f"{method} passes features through the head by itself, and {name!r} (a {type(head).__name__}), called with "
            f"features of the shape (2, {width}) alone, {problem}: let it give scores (2, classes) for these, or use a "
            "method that leaves the head's calls to the module, such as FedPAC or FedProto"
        ) from cause


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


def _linear(head: nn.Module) -> list[nn.Module]:
    """Layers with a weight (out, in), of whatever class: of a graph library, normalized, parametrized, adapted."""
    named = [layer for name, layer in head.named_modules() if not in_parametrization(name)]
    return [layer for layer in named if isinstance(layer, nn.Linear) or _size(layer, 0) is not None]


def _size(layer: nn.Module | None, dimension: int) -> int | None:
    weight = None if layer is None or isinstance(layer, _TABLES) else getattr(layer, "weight", None)
    return weight.shape[dimension] if isinstance(weight, Tensor) and weight.ndim == 2 else None
