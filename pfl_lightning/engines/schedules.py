"""Optimizers of a local fit, and schedules of the learning rate over the rounds, of built-in methods.

Those of a user's module: ``drop_in/fits/over_rounds.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.errors import ConfigurationError


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
            f"round {context.round + 1}): give it total_steps={fits * steps}, or {restart}"
        )
    scheduler.optimizer._opt_called = True  # or torch warns that the optimizer never stepped
    for _ in range(context.earlier_fits * steps):
        scheduler.step()


@dataclass(frozen=True)
class Scheduler:
    """A learning-rate scheduler and when it steps."""

    scheduler: Any
    every_step: bool


class StepCount:
    """Counts the steps that optimizers take, by their own hooks.

    A step that a gradient scaler skips never reaches the optimizer and is not counted.

    Args:
        optimizers: Optimizers whose steps are counted together.
    """

    def __init__(self, optimizers: Iterable[Optimizer] = ()) -> None:
        self.num_steps = 0
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._count)

    def _count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A fused optimizer is called in any case, and skips inside its kernel.
        found_inf = getattr(optimizer, "found_inf", None)
        self.num_steps += found_inf is None or not bool(found_inf)


def unpack_optimizers(configured: Any) -> tuple[Optimizer, list[Scheduler]]:
    """Read what ``configure_optimizers`` may return: one optimizer, with schedulers or without.

    Raises:
        ConfigurationError: Several optimizers or none, or a scheduler that watches a metric.
    """
    schedulers: Any = []
    if isinstance(configured, tuple | list) and len(configured) == 1:
        configured = configured[0]
    if isinstance(configured, dict):
        schedulers = [configured["lr_scheduler"]] if "lr_scheduler" in configured else []
        configured = configured["optimizer"]
    elif isinstance(configured, tuple | list) and len(configured) == 2 and isinstance(configured[0], tuple | list):
        configured, schedulers = configured
    if isinstance(configured, tuple | list) and len(configured) == 1:
        configured = configured[0]
    if not isinstance(configured, Optimizer):
        raise ConfigurationError(
            f"this engine takes one optimizer from configure_optimizers, got {configured!r}; several need TrainerEngine"
        )
    return configured, [_read_scheduler(entry) for entry in schedulers]


def _read_scheduler(entry: Any) -> Scheduler:
    settings = entry if isinstance(entry, dict) else {"scheduler": entry}
    scheduler, interval = settings["scheduler"], settings.get("interval", "epoch")
    if isinstance(scheduler, ReduceLROnPlateau) or settings.get("frequency", 1) != 1:
        raise ConfigurationError(
            "this engine steps schedulers every epoch or every step and watches no metric; "
            "ReduceLROnPlateau and other frequencies need TrainerEngine"
        )
    if interval not in ("epoch", "step"):
        raise ConfigurationError(f"a scheduler's interval must be 'epoch' or 'step', got {interval!r}")
    return Scheduler(scheduler, interval == "step")
