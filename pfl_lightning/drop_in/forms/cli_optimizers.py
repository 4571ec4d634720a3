"""The optimizer that a LightningCLI made for a module (``--optimizer``), made again for every copy of the module."""

from __future__ import annotations

import copy
from functools import partial
from types import MethodType
from typing import Any

import lightning as L
import torch
from torch import nn

from pfl_lightning.errors import ConfigurationError

__all__ = ["CLIOptimizers", "take_cli_optimizers"]


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
