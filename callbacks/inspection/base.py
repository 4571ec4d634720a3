"""Base of the inspection callbacks: the rounds in which they show something, and the loggers or files for it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import lightning as L

from pfl_lightning.callbacks.inspection.recorder import Recorder
from pfl_lightning.checks import check_at_least
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation import Federation
from pfl_lightning.federation.loop import RoundLoop

LOSSES = {
    "loss": {
        "loss by component, mean over the cohort": ["Multiline", ["train/(?!clients_left_out).*"]],
        "loss on the clients' own splits": ["Multiline", [".*loss/mean"]],
    }
}
"""Charts of the losses that :class:`~pfl_lightning.callbacks.FederatedLoop` and the federation always log."""


class InspectionCallback(L.Callback):
    """Base of the callbacks that inspect a run without changing its results.

    A subclass overrides :meth:`show`, which is called after the first round, after every ``every_n_rounds``-th and
    after the last. :meth:`after_round` and :meth:`after_evaluation` are called in every round, for cheap scalars.

    Args:
        every_n_rounds: Rounds between two figures.
        dirpath: Folder for figures and text that no logger accepts; ``None`` is ``inspection`` in the run's folder.

    Attributes:
        recorder: Recorder of figures and scalars, from the start of a fit.

    Raises:
        ConfigurationError: If ``every_n_rounds`` is less than one.
    """

    charts: ClassVar[Mapping[str, Mapping[str, list[Any]]]] = {}
    """Charts of the logged scalars for TensorBoard's Custom Scalars tab: by category and title their kind and tags."""

    of_evaluations: ClassVar[bool] = False
    """Whether :meth:`show` shows scores: it is called after rounds that were evaluated, and after no others."""

    def __init__(self, every_n_rounds: int = 10, dirpath: str | None = None) -> None:
        check_at_least(f"{type(self).__name__}: every_n_rounds", every_n_rounds, 1)
        self.every_n_rounds, self.dirpath = every_n_rounds, dirpath
        self.optional = False
        """True if a run with nothing to show gets no warning, as in a group of callbacks."""
        self._unavailable: str | None = None
        self._round: int | None = None  # the last finished round of this fit
        self._shown: int | None = None
        self._evaluated: int | None = None  # the last round of this fit that was evaluated
        self._is_due = False

    # ------------------------------------------------------------------ for subclasses

    def unavailable(self, trainer: L.Trainer, federation: Federation) -> str | None:
        """Reason why this run has nothing to show, else None; called once, before the first round."""
        return None

    def before_fit(self, trainer: L.Trainer, federation: Federation) -> None:
        """Called once before the first round of this fit, after a checkpoint was loaded."""

    def after_evaluation(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Called after the evaluation of a round."""

    def after_round(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Called after every round."""

    def show(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Called after the first, every ``every_n_rounds``-th and the last round."""

    # ------------------------------------------------------------------ Lightning's hooks

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Set up the recorder and check whether there is anything to show.

        Raises:
            ConfigurationError: If the module is no Federation.
        """
        if not isinstance(pl_module, Federation):
            raise ConfigurationError(
                f"{type(self).__name__} inspects a Federation, got {type(pl_module).__name__}: remove the callback, or "
                "train a Federation"
            )
        self.recorder = Recorder(trainer, self.dirpath)
        self._round = self._shown = self._evaluated = None
        self._is_due = False
        self._unavailable = self.unavailable(trainer, pl_module)
        if self._unavailable is not None and not self.optional:
            warnings.warn(f"{type(self).__name__} shows nothing: {self._unavailable}", stacklevel=2)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Group the scalars of all inspection callbacks into charts; the first callback does it for all."""
        every = [one for one in trainer.callbacks if isinstance(one, InspectionCallback)]  # type: ignore[attr-defined]
        if every[0] is self:
            found: dict[str, dict[str, list[Any]]] = {}
            for charts in (*(one.charts for one in every if one._unavailable is None), LOSSES):
                for category, by_title in charts.items():
                    found.setdefault(category, {}).update(by_title)
            self.recorder.layout(found)
        if self._unavailable is None:
            self.before_fit(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Call :meth:`after_evaluation` for an evaluation during training."""
        is_known = trainer.state.fn == "fit" and not trainer.sanity_checking and _is_over(trainer)
        if is_known and self._unavailable is None:
            self._evaluated = trainer.current_epoch
            self.after_evaluation(trainer, pl_module, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Call :meth:`after_round`, and :meth:`show` when it is due."""
        if self._unavailable is None and _is_over(trainer):
            self._round = trainer.current_epoch
            self.after_round(trainer, pl_module, self._round)
            self._is_due |= self._round == 0 or (self._round + 1) % self.every_n_rounds == 0
            if self._is_due:
                self._show(trainer, pl_module, self._round)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Show the last round, also after an interrupted run."""
        if self._round is not None:
            self._show(trainer, pl_module, self._round)

    def _show(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        if self._shown != round and (not self.of_evaluations or self._evaluated == round):
            self._shown, self._is_due = round, False
            self.show(trainer, federation, round)


def _is_over(trainer: L.Trainer) -> bool:
    """Whether the round is, and was not stopped in its middle."""
    return all(one.aggregated for one in trainer.callbacks if isinstance(one, RoundLoop))  # type: ignore[attr-defined]
