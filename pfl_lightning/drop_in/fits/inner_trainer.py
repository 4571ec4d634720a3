"""The Trainer of one client's local fit or evaluation, as the client's module finds it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor
from torch.optim import Optimizer

from pfl_lightning.drop_in.fits.loggers import OuterRun
from pfl_lightning.drop_in.fits.module_calls import names_in_code
from pfl_lightning.drop_in.outer.handed_in import copies, sees_evaluations
from pfl_lightning.fit.tasks import MakeTrainer

_log = logging.getLogger(__name__)


READ = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
"""What a Trainer has of the values that were logged."""

_EVALUATING = ("validation_", "on_validation_", "test_", "on_test_", "predict_", "on_predict_")
"""What names of hooks and steps of evaluations begin with, which find what their own evaluation has logged."""


def reads_metrics(module: L.LightningModule, callbacks: Iterable[L.Callback]) -> bool:
    """Whether code that runs in a training, of a module or of callbacks, reads the values that its Trainer has."""
    return any(not names_in_code(owner, _EVALUATING).isdisjoint(READ) for owner in (module, *callbacks))


def metrics_of(trainer: Any) -> dict[str, dict[str, float]]:
    """The values that a Trainer has at the end of a fit, for the client's next."""
    return {name: {key: float(value) for key, value in getattr(trainer, name).items()} for name in READ}


def give_metrics(trainer: Any, values: Mapping[str, Mapping[str, float]]) -> None:
    """Let a Trainer begin with the values that the client's last fit has ended with, as a fit's next epoch does."""
    for name, own in values.items():
        shown = own if name == "progress_bar_metrics" else {key: torch.tensor(value) for key, value in own.items()}
        getattr(trainer, name).update(shown)


class Trainer(L.Trainer):
    """Answers as the one Trainer of a plain run would. By its name Lightning reads ``PL_TRAINER_...`` for it, too.

    It shows the outer Trainer's callbacks for checkpoints and early stopping where it has none. In an evaluation it
    makes optimizers and schedulers when it is asked for them: the validation of a plain fit has some.
    """

    outer_run = OuterRun()
    """The outer Trainer and its turn."""
    evaluates = False
    """Whether it validates or tests, and so has no optimizers of its own."""
    _was_asked = False

    @property
    def checkpoint_callbacks(self) -> Any:
        """Callbacks that save."""
        return super().checkpoint_callbacks or getattr(self.outer_run.trainer, "checkpoint_callbacks", [])

    @property
    def early_stopping_callbacks(self) -> Any:
        """Callbacks that stop."""
        return super().early_stopping_callbacks or getattr(self.outer_run.trainer, "early_stopping_callbacks", [])

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
        if self.evaluates and not self._was_asked and not self.strategy.optimizers:
            self._was_asked = True
            _say_of_optimizers(type(self.lightning_module).__name__)
            self.strategy.setup_optimizers(self)


@cache
def _say_of_optimizers(name: str) -> None:
    _log.warning(
        "%s asks for its optimizers or schedulers (self.optimizers(), self.lr_schedulers()) in an evaluation, where a "
        "client has none: it gets new ones from configure_optimizers, without state. Ask for them "
        "in training hooks, or where self.trainer.training is true",
        name,
    )


def keep_results_in_place(trainer: Any) -> None:
    """Skip Lightning's walk through all that belongs to a record at every call of ``self.log``.

    The walk moves nothing and takes as long as a step of a small model. What is logged is the same.
    """
    steps = trainer.fit_loop.epoch_loop
    for loop in (steps, steps.val_loop, trainer.validate_loop, trainer.test_loop):
        if type(loop._results) is _ResultCollection:  # not of pytorch_lightning, and not replaced already
            loop._results = _Results(loop._results.training)


class _Record(_ResultMetric):
    """The record of one logged value."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        value = getattr(self, "value", None)
        there = isinstance(value, Tensor) and args == (value.device,)
        return self if there else super().to(*args, **kwargs)


class _Results(_ResultCollection):
    """The records by name."""

    def __setitem__(self, name: str, record: _ResultMetric) -> None:
        super().__setitem__(name, _Record(record.meta, record.is_tensor))


class LocalHooks:
    """Callbacks of inner Trainers, and loggers that pass on to those of the outer Trainer.

    One for all clients: copies of a client share it. A worker process gets the callbacks, and no loggers.

    Args:
        callbacks: Those that were given for local fits.

    Attributes:
        given: Those.
        moved: Callbacks of the outer Trainer that run inside, too.
        outer: The outer Trainer and its turn.
    """

    def __init__(self, callbacks: Sequence[L.Callback] = ()) -> None:
        self.given, self.moved = list(callbacks), list[L.Callback]()
        self.outer = OuterRun()

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalHooks:
        return self

    @property
    def callbacks(self) -> list[L.Callback]:
        """All callbacks of local fits."""
        return [*self.given, *self.moved]

    def trainer(
        self,
        make_trainer: MakeTrainer,
        module: L.LightningModule,
        callbacks: Sequence[Any],
        rates: dict[str, float] | None = None,
        **options: Any,
    ) -> Any:
        """An inner Trainer; ``None`` where the engine has none.

        Args:
            make_trainer: Makes it.
            module: The module that it runs.
            callbacks: Further callbacks.
            rates: For a fit, takes the learning rates that are logged; ``None`` for an evaluation.
            options: Its options.
        """
        own = copies(self.callbacks if rates is not None else filter(sees_evaluations, self.callbacks))
        options |= self.outer.options(module, own, {} if rates is None else rates)
        trainer = make_trainer([*own, *self.outer.callbacks(), *callbacks], kind=Trainer, **options)
        if isinstance(trainer, Trainer):
            trainer.outer_run, trainer.evaluates = self.outer, rates is None
            keep_results_in_place(trainer)
        return trainer
