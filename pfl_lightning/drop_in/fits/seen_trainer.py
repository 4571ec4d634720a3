"""What a module finds as its Trainer inside local fits and evaluations, where the Trainer is one client's."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import lightning as L
from torch.optim import Optimizer

from pfl_lightning.drop_in.fits.loggers import OuterRun

__all__ = ["as_seen"]

_log = logging.getLogger(__name__)


def as_seen(trainer: Any, outer: OuterRun, evaluates: bool = False) -> Any:
    """Let an inner Trainer answer as the one Trainer of a plain run would.

    Args:
        trainer: The inner Trainer; ``None`` stays ``None``.
        outer: The outer Trainer and its turn.
        evaluates: Whether it validates or tests, and so has no optimizers of its own.
    """
    if trainer is not None:
        object.__setattr__(trainer, "__class__", _EvaluatingTrainer if evaluates else _FittingTrainer)
        trainer.outer_run = outer
    return trainer


class _FittingTrainer(L.Trainer):
    """An inner Trainer, which shows the outer one's callbacks for checkpoints and early stopping where it has none."""

    outer_run: OuterRun

    @property
    def checkpoint_callbacks(self) -> Any:
        """Callbacks that save."""
        return super().checkpoint_callbacks or getattr(self.outer_run.trainer, "checkpoint_callbacks", [])

    @property
    def early_stopping_callbacks(self) -> Any:
        """Callbacks that stop."""
        return super().early_stopping_callbacks or getattr(self.outer_run.trainer, "early_stopping_callbacks", [])


class _EvaluatingTrainer(_FittingTrainer):
    """It makes optimizers and schedulers when it is asked for them: the validation of a plain fit has some."""

    _was_asked = False

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers."""
        self._make_optimizers()
        return self.strategy.optimizers

    @optimizers.setter
    def optimizers(self, new: list[Optimizer]) -> None:
        self.strategy.optimizers = new

    @property
    def lr_scheduler_configs(self) -> Any:
        """The schedulers, with their settings."""
        self._make_optimizers()
        return self.strategy.lr_scheduler_configs

    def _make_optimizers(self) -> None:
        if self._was_asked or self.strategy.optimizers:
            return
        self._was_asked, name = True, type(self.lightning_module).__name__
        try:
            self.strategy.setup_optimizers(self)
        except Exception as error:  # of the user's code, which may ask for what there is in a fit alone
            _say_that_there_are_none(name, f"{type(error).__name__}: {error}")
        else:
            _say_that_optimizers_are_new(name)


@cache
def _say_that_optimizers_are_new(name: str) -> None:
    _log.warning(
        "%s asks for its optimizers or schedulers (self.optimizers(), self.lr_schedulers()) in an evaluation, where a "
        "client has none: it gets new ones of its configure_optimizers, with their first rates and without what they "
        "have learned",
        name,
    )


@cache
def _say_that_there_are_none(name: str, reason: str) -> None:
    _log.warning(
        "%s asks for its optimizers or schedulers in an evaluation, where a client has none, and its "
        "configure_optimizers cannot make new ones there (%s): ask for them in hooks of the training, or where "
        "self.trainer.training is true",
        name,
        reason,
    )
