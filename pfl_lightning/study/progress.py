"""How far a run is, written after every round to a small file that a study reads."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L

from pfl_lightning.state.files import replace_file

__all__ = ["Progress", "ProgressFile", "read_progress"]


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        round: Rounds played, those before a resume included.
        rounds: Rounds in all.
        seconds_per_round: Mean over the rounds of this process, evaluations included.
        test: Mean test accuracy of the last evaluated round, in [0, 1].
        validation: Mean validation accuracy of the last evaluated round.
        best_validation: The highest mean validation accuracy of a round of this process.
    """

    round: int
    rounds: int
    seconds_per_round: float
    test: float | None = None
    validation: float | None = None
    best_validation: float | None = None


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

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._began, self._played = time.monotonic(), 0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the file; a full disk is left to those who write more."""
        self._played += 1
        test, validation = (self._accuracy(trainer, name) for name in ("test_accuracy/mean", "accuracy/mean"))
        if validation is not None:
            self._best = validation if self._best is None else max(self._best, validation)
        progress = Progress(
            round=trainer.current_epoch + 1,
            rounds=trainer.max_epochs or 0,
            seconds_per_round=(time.monotonic() - self._began) / self._played,
            test=test,
            validation=validation,
            best_validation=self._best,
        )
        with suppress(OSError), replace_file(Path(self.path)) as temporary:
            temporary.write_text(json.dumps(asdict(progress)) + "\n")

    @staticmethod
    def _accuracy(trainer: L.Trainer, name: str) -> float | None:
        value: Any = trainer.callback_metrics.get(name)
        return None if value is None else float(value)


def read_progress(path: Path) -> Progress | None:
    """What a run wrote last; ``None`` before its first round."""
    try:
        return Progress(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
