"""Callbacks of a study's runs and of a search's trials, which the command line of their processes names."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L

from pfl_lightning.callbacks.run_facts import evaluated
from pfl_lightning.federation import Federation
from pfl_lightning.state.files import replace_file
from pfl_lightning.study.runs.state import Progress, read_progress

__all__ = ["ProgressFile", "ValidationOnly"]


class ProgressFile(L.Callback):
    """Writes the number of rounds and the last accuracies to a file after every round.

    Args:
        path: The file, of JSON.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._began = 0.0
        self._played = 0
        self._best: float | None = None
        self._last: tuple[float | None, float | None] = (None, None)  # test and validation, of the last evaluated round
        self._score = "classifier"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock; a run that goes on takes over the best round so far."""
        self._began, self._played = time.monotonic(), 0
        self._score = evaluated(pl_module)["score"] if isinstance(pl_module, Federation) else self._score
        before = read_progress(Path(self.path)) if trainer.current_epoch else None
        self._best = before.best_validation if before is not None else None
        self._last = (before.test, before.validation) if before is not None else (None, None)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the file; a full disk is left to those who write more."""
        self._played += 1
        found = (self._accuracy(trainer, name) for name in ("test_accuracy/mean", "val_accuracy/mean"))
        test, validation = (old if new is None else new for new, old in zip(found, self._last, strict=True))
        self._last = (test, validation)
        if validation is not None:
            self._best = validation if self._best is None else max(self._best, validation)
        progress = Progress(
            round=trainer.current_epoch + 1,
            rounds=trainer.max_epochs or 0,
            seconds_per_round=(time.monotonic() - self._began) / self._played,
            test=test,
            validation=validation,
            best_validation=self._best,
            score=self._score,
        )
        with suppress(OSError), replace_file(Path(self.path)) as temporary:
            temporary.write_text(json.dumps(asdict(progress)) + "\n")

    @staticmethod
    def _accuracy(trainer: L.Trainer, name: str) -> float | None:
        value: Any = trainer.callback_metrics.get(name)
        return None if value is None else float(value)


class ValidationOnly(L.Callback):
    """Leaves the clients' test parts alone during a fit: a search must not see them."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Say so to the federation."""
        pl_module.tests_in_fits = False  # type: ignore[assignment]
