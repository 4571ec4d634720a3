"""First weights of the further models of methods that train several, which would stay equal if they began equal."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Sequence

import torch
from torch import nn

from pfl_lightning.client import FederatedClient
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.messages import State
from pfl_lightning.seeding import Purpose, derive_seed, torch_seed
from pfl_lightning.state.tensors import select_state


def further_starts(
    client: FederatedClient, names: Sequence[str], part: str, count: int, seed: int, made: Sequence[nn.Module]
) -> list[State]:
    """First states of several models: the client's own, and further draws of its weights.

    What was frozen keeps its weights, and its running statistics. Torch's layers get new weights, and then a further
    encoder is taken over.

    Args:
        client: The client as it is before the first round.
        names: What the models have each of their own.
        part: What a model is called, see :func:`check_starts`.
        count: Number of models.
        seed: Seed of the draws.
        made: Further encoders, made with seeds of their own, one for each model but the first; or none.

    Raises:
        ConfigurationError: A further draw has the same weights.
    """
    starts: list[State] = [select_state(client, names)]
    for number in range(1, count):
        fresh = copy.deepcopy(client)
        with torch_seed(derive_seed(seed, Purpose.INITIAL_WEIGHTS, number)):
            reset_layers(fresh, keep=client.frozen)
        if made:
            take_weights(fresh.encoder, made[number - 1])
        starts.append(select_state(fresh, names))
    check_starts(type(client).__name__, part, starts)
    return starts


def reset_layers(network: nn.Module, keep: Collection[str] = ()) -> None:
    """Give torch's layers new weights by ``reset_parameters``; not of layers that hold what is to be kept.

    Example:
        >>> import torch
        >>> from pfl_lightning.methods._starts import reset_layers
        >>> network = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 2)})
        >>> before = network["head"].weight.clone()
        >>> reset_layers(network, keep={"head.weight"}), torch.equal(network["head"].weight, before)
        (None, True)
        >>> reset_layers(network), torch.equal(network["head"].weight, before)
        (None, False)
    """
    for prefix, layer in network.named_modules():
        held = (*layer.named_parameters(), *layer.named_buffers())
        own = {f"{prefix}.{name}" if prefix else name for name, _ in held}
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset) and not own.intersection(keep):
            reset()


@torch.no_grad()
def take_weights(network: nn.Module, other: nn.Module, keep: Collection[str] = ()) -> None:
    """Copy the weights of another network of the same architecture, but for the names that are to be kept."""
    theirs = other.state_dict()
    for name, tensor in network.state_dict().items():
        if name not in keep:
            tensor.copy_(theirs[name])


def check_starts(method: str, part: str, starts: Sequence[State]) -> None:
    """Warn of models that begin with equal encoders, and refuse those that begin equal altogether.

    Args:
        method: Name of the method.
        part: What a model is called there, such as ``"cluster"``.
        starts: First states of the models, of what trains and is each model's own.

    Raises:
        ConfigurationError: A model begins as the first one, and would stay equal to it.
    """
    for number, start in enumerate(starts[1:], start=2):
        equal = {name for name, value in start.items() if torch.equal(starts[0][name], value)}
        encoders = {name for name in start if name.startswith("encoder.")}
        if start and equal == set(start):
            raise ConfigurationError(
                f"{part} {number} of {method} would begin with the weights of the first one and stay equal to it: "
                "neither making the encoder again nor reset_parameters() of its layers gives new random weights. Use "
                f"layers that initialize themselves at random, let the heads differ, too, or use one {part}"
            )
        if encoders and encoders <= equal:
            warnings.warn(
                f"{part} {number} of {method} begins with the encoder of the first one, and a head of its own: right "
                "for pre-trained weights; otherwise use layers that initialize themselves at random",
                stacklevel=2,
            )
            return
