"""Copies of a user's module, also where ``copy.deepcopy`` does not take it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from functools import partial
from types import MethodType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from pfl_lightning.datamodules.adapters.stages import data_in
from pfl_lightning.drop_in.client.frozen import shared_memory
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.older_package import made_lightning, written_class
from pfl_lightning.state.closures import bind_functions
from pfl_lightning.state.tensors import tensors_in

__all__ = ["CLIOptimizers", "Factory", "copied", "held_tensors", "make_leaves", "take_cli_optimizers"]

Factory = Callable[[], L.LightningModule]


def copied(
    module: L.LightningModule, factory: Factory | None = None, shared: Collection[str] = ()
) -> L.LightningModule:
    """A copy of lightning's package that is not compiled: a compiled call would go on with the original's weights.

    Args:
        module: The module.
        factory: Makes the module once more, with any weights; ``None`` copies all of its attributes.
        shared: Names of parameters whose memory the copy shares, since they never change.

    Raises:
        ConfigurationError: It cannot be copied, or the factory makes something else.
    """
    if factory is None:
        try:
            other = copy.deepcopy(module, held_tensors(module) | shared_memory(module, shared))
        except Exception as error:
            name, reason = type(module).__name__, f"{type(error).__name__}: {error}"
            raise ConfigurationError(
                f"clients train copies of {name}, and it cannot be copied: {reason}. Give federate(..., "
                f"module_factory=...) a function that makes it once more, such as lambda: {name}(...), whose weights "
                "are then copied; or make what cannot be copied (a lock, an open file, a connection) in on_fit_start"
            ) from error
        bind_functions(module, other)
        make_leaves(other)
    else:
        other = _made_again(module, factory, shared)
    take_cli_optimizers(module, other)
    made_lightning(other)
    for layer in other.modules():
        layer._compiled_call_impl = None
    return other


def make_leaves(copied: nn.Module) -> None:
    """Make parameters of a copied TorchScript layer ones that train: torch copies them as results of a computation."""
    for parameter in copied.parameters():
        if not parameter.is_leaf:
            parameter.detach_().requires_grad_()


def held_tensors(module: nn.Module) -> dict[int, Any]:
    """Copies of results of computations that a module or a layer holds on to, without gradient, as a memo of deepcopy.

    Such are the weights of ``torch.nn.utils.weight_norm`` and images that a step keeps; deepcopy refuses them. Data
    sets and loaders that a module brings stand for themselves: all copies share them.
    """
    values = (value for layer in module.modules() for value in vars(layer).values())
    every = list(values)
    found = {id(tensor): tensor for tensor in tensors_in(every) if not tensor.is_leaf}
    data = {id(one): one for value in every for one in data_in(value)}
    return {number: tensor.detach().clone() for number, tensor in found.items()} | data


def _made_again(module: L.LightningModule, factory: Factory, shared: Collection[str]) -> L.LightningModule:
    with isolate_rng():
        other = factory()
    name = written_class(module).__name__
    if type(other) is not written_class(module) or other is module:
        what = "the same object" if other is module else f"a {type(other).__name__}"
        raise ConfigurationError(f"module_factory must make a new {name} at every call, it made {what}")
    _take_over(dict(module.named_parameters()), dict(other.named_parameters()), name, shared)
    _take_over(dict(module.named_buffers()), dict(other.named_buffers()), name)
    for own, layer in zip(module.modules(), other.modules(), strict=True):
        layer.training = own.training
    return other


@torch.no_grad()
def _take_over(given: dict[str, Tensor], made: dict[str, Tensor], name: str, shared: Collection[str] = ()) -> None:
    if [(n, t.shape) for n, t in given.items()] != [(n, t.shape) for n, t in made.items()]:
        raise ConfigurationError(
            f"module_factory makes a {name} with other names or shapes of parameters or buffers than the module given: "
            "call it with the same arguments"
        )
    for own, value in given.items():
        made[own].data = value.detach() if own in shared else value.detach().clone()  # also its dtype and device
        made[own].requires_grad_(value.requires_grad)


# ---------------------------------------------------------------------- optimizers of a command line


class CLIOptimizers:
    """In the place of ``configure_optimizers`` of a copy: a new optimizer and scheduler of its own parameters.

    A LightningCLI makes one optimizer, of the parameters of the module that it makes. Copies would step those.

    Args:
        module: The module of the LightningCLI.
        made: What it has in the place of the method.
    """

    def __init__(self, module: L.LightningModule, made: partial[Any]) -> None:
        self._function = made.func
        memo: dict[int, Any] = {}
        self._places: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            place = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            self._places[name] = memo[id(parameter)] = place
        self._made = copy.deepcopy(dict(made.keywords), memo)

    @property
    def __code__(self) -> Any:
        """By which Lightning sees that the method is not its own."""
        return getattr(self._function, "__func__", self._function).__code__

    def __call__(self, module: L.LightningModule) -> Any:
        """What the LightningCLI's function returns, for this module.

        Raises:
            ConfigurationError: The module has other parameters.
        """
        own = dict(module.named_parameters())
        lost = self._places.keys() - own.keys()
        if lost:
            raise ConfigurationError(
                f"the optimizer of the command line has the parameter {min(lost)}, which a copy of the module does "
                "not have"
            )
        made = copy.deepcopy(self._made, {id(place): own[name] for name, place in self._places.items()})
        for value in made.values():
            if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
                _count_steps(value.optimizer)
        return self._function(module, **made)


def take_cli_optimizers(given: L.LightningModule, other: L.LightningModule) -> None:
    """Let a copy have optimizers of its own where a LightningCLI has given the module some."""
    own = vars(given).get("configure_optimizers")
    made = getattr(own, "__func__", None)
    if isinstance(made, partial) and any(isinstance(v, torch.optim.Optimizer) for v in made.keywords.values()):
        vars(other)["configure_optimizers"] = MethodType(CLIOptimizers(given, made), other)


def _count_steps(optimizer: Any) -> None:
    """What a scheduler does to its optimizer's ``step``, which a copy of the optimizer loses."""

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step
