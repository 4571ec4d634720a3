"""How far a run is, by the small file that its :class:`~pfl_lightning.study.runs.progress_file.ProgressFile` writes."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pfl_lightning.study.definition.plan import Run

__all__ = ["Progress", "copy_progress", "read_progress"]


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        round: Rounds played, those before a resume included.
        rounds: Rounds in all.
        seconds_per_round: Mean over the rounds of this process, evaluations included.
        test: Mean test accuracy of the last evaluated round, in [0, 1].
        validation: Mean validation accuracy of the last evaluated round.
        best_validation: The highest mean validation accuracy of a round, those before a resume included.
        score: What was evaluated: ``"classifier"``, ``"nearest_neighbor"`` or ``"metric"``.
    """

    round: int
    rounds: int
    seconds_per_round: float
    test: float | None = None
    validation: float | None = None
    best_validation: float | None = None
    score: str = "classifier"


def read_progress(path: Path) -> Progress | None:
    """What a run wrote last; ``None`` before its first round."""
    try:
        return Progress(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def copy_progress(trained: Run, run: Run) -> None:
    """Let a run be as far as another one, whose training it goes on after.

    Args:
        trained: The other run.
        run: The run.
    """
    with suppress(OSError):  # without it, accuracy and time left are not shown while the study runs
        shutil.copyfile(trained.progress_file, run.progress_file)
