"""Schedules of the learning rate over the rounds: what a local fit's count before it."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.engines.tasks import FitTask
from pfl_lightning.errors import ConfigurationError

__all__ = ["advance", "earlier_fits", "handed_on"]


def earlier_fits(client: FederatedClient, task: FitTask) -> int | None:
    """Number of local fits that the client's schedules count before this one; ``None`` where they start again."""
    if client.schedule == "rounds":
        return task.context.round
    return int(task.carried or 0) if client.schedule == "continue" else None


def handed_on(client: FederatedClient, context: FitContext) -> bytes | None:
    """What a fit that has ended hands on to the client's next: how many there were, or what the client says itself."""
    if client.schedule != "continue" or context.earlier_fits is None:
        return client.carried
    return b"%d" % (context.earlier_fits + 1)


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
            f"{name} has {total} steps, and {fits} local fits of {steps} take {fits * steps} (client {context.client}, "
            f"round {context.round + 1}): give it total_steps={fits * steps}, or {restart}"
        )
    scheduler.optimizer._opt_called = True  # or torch warns that the optimizer never stepped
    for _ in range(context.earlier_fits * steps):
        scheduler.step()
