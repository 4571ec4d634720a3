"""Callbacks of a study's runs and of a search's trials, which the command line of their processes names."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L

from pfl_lightning.callbacks.run_facts import evaluated
from pfl_lightning.federation import Federation
from pfl_lightning.state.files import replace_file
from pfl_lightning.study.runner import Progress, read_progress

METRICS = {"test": "test_accuracy/mean", "validation": "val_accuracy/mean"}
"""What of a run's metrics is shown while it runs."""


class ProgressFile(L.Callback):
    """Writes the number of rounds and the last accuracies to a file after every round.

    Args:
        path: The file, of JSON.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._last = Progress(0, 0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start from nothing; a resumed run takes over the last accuracies and the best round so far."""
        self._last = (read_progress(Path(self.path)) if trainer.current_epoch else None) or Progress(0, 0)
        if isinstance(pl_module, Federation):
            self._last = replace(self._last, score=evaluated(pl_module)["score"])

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the file; a full disk is left to those who write more."""
        found = {name: trainer.callback_metrics.get(metric) for name, metric in METRICS.items()}
        new: dict[str, Any] = {name: float(value) for name, value in found.items() if value is not None}
        best = [value for value in (self._last.best_validation, new.get("validation")) if value is not None]
        new |= {"round": trainer.current_epoch + 1, "rounds": trainer.max_epochs or 0}
        self._last = replace(self._last, best_validation=max(best, default=None), **new)
        with suppress(OSError), replace_file(Path(self.path), lasting=False) as temporary:
            temporary.write_text(json.dumps(asdict(self._last)) + "\n")


class ValidationOnly(L.Callback):
    """Leaves the clients' test parts alone during a fit: a search must not see them."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Say so to the federation."""
        pl_module.tests_in_fits = False  # type: ignore[assignment]
