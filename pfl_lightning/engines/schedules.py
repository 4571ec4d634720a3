"""Optimizers of a local fit, and schedules of the learning rate over the rounds, of built-in methods.

Those of a user's module: ``drop_in/fits/over_rounds.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.lightning_private import configured


def advance(scheduler: Any, client: FederatedClient, phase: Phase, context: FitContext, steps: int) -> None:
    """Bring a scheduler that has just been made to where the earlier local fits would have left it.

    Args:
        scheduler: The scheduler.
        client: Whose it is.
        phase: The current phase.
        context: Context of the fit.
        steps: How often the phase steps the scheduler in a local fit.

    Raises:
        ConfigurationError: It watches a metric, or ends before the run does.
    """
    if context.earlier_fits is None:
        return
    name = f"{type(scheduler).__name__} in phase {phase.name!r} of {type(client).__name__}"
    restart = "use schedule='restart', under which it starts again in every local fit"
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(f"{name} watches a metric, whose values of earlier rounds are not kept: {restart}")
    planned = context.facts.num_rounds if client.schedule == "rounds" else None
    fits = max(planned or 0, context.earlier_fits + 1)
    total = getattr(scheduler, "total_steps", None)
    if total is not None and total < fits * steps:
        raise ConfigurationError(
            f"{name} has {total} steps, and {fits} local fits of {steps} take {fits * steps} ({context.who}, "
            f"round {context.round + 1}): set total_steps={fits * steps}, or {restart}"
        )
    scheduler.optimizer._opt_called = True  # or torch warns that the optimizer never stepped
    for _ in range(context.earlier_fits * steps):
        scheduler.step()


class StepCount:
    """Counts the steps that optimizers take, by their own hooks.

    A step that a gradient scaler skips never reaches the optimizer and is not counted. A fused optimizer is called in
    any case, and skips inside its kernel: what it has found is read with the count, since a step would wait for it.

    Args:
        optimizers: Optimizers whose steps are counted together.
    """

    def __init__(self, optimizers: Iterable[Optimizer] = ()) -> None:
        self.calls, self._skipped = 0, list[Tensor]()
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._count)

    def _count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.calls += 1
        found = getattr(optimizer, "found_inf", None)
        self._skipped += [] if found is None else [found]

    @property
    def num_steps(self) -> int:
        """Steps that have changed the parameters."""
        return self.calls - (int(torch.stack(self._skipped).sum()) if self._skipped else 0)


def unpack_optimizers(returned: Any) -> tuple[Optimizer, list[Any]]:
    """Read what ``configure_optimizers`` may return, as Lightning does: one optimizer, with schedulers or without.

    Returns:
        The optimizer, and a configuration of Lightning for each scheduler.

    Raises:
        ConfigurationError: Several optimizers or none, or a scheduler that watches a metric.
    """
    try:
        optimizers, configs = configured(returned)
    except MisconfigurationException as error:
        wanted = "this engine takes one optimizer from configure_optimizers"
        raise ConfigurationError(f"{wanted}, got {returned!r}: {error}") from error
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"this engine takes one optimizer from configure_optimizers, got {returned!r}; several need TrainerEngine"
        )
    if any(isinstance(own.scheduler, ReduceLROnPlateau) or own.frequency != 1 for own in configs):
        raise ConfigurationError(
            "this engine steps schedulers every epoch or every step and watches no metric; "
            "ReduceLROnPlateau and other frequencies need TrainerEngine"
        )
    return optimizers[0], configs
