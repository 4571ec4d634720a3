"""Optimizers and schedulers of a client's ``configure_optimizers``, and a count of their steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from pfl_lightning.errors import ConfigurationError

__all__ = ["Scheduler", "StepCount", "unpack_optimizers"]


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
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or settings.get("frequency", 1) != 1:
        raise ConfigurationError(
            "this engine steps schedulers every epoch or every step and watches no metric; "
            "ReduceLROnPlateau and other frequencies need TrainerEngine"
        )
    if interval not in ("epoch", "step"):
        raise ConfigurationError(f"a scheduler's interval must be 'epoch' or 'step', got {interval!r}")
    return Scheduler(scheduler, interval == "step")
