"""What a search says while its trials run: a line for each trial that ends, and one a minute for those that run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pfl_lightning.study.search.report import TriedOptions, option_text
from pfl_lightning.study.timing import duration

__all__ = ["EVERY", "Narrator", "Say"]

Say = Callable[[str], None]
"""Prints a line."""

EVERY = 60.0
"""Seconds between two lines about trials that run."""


class Narrator:
    """Tells how far a search is. Its methods may be called from several threads.

    Args:
        trials: Trials in all.
        rounds: Rounds of a trial.
        processes: Trials at once.
        say: Prints a line.
    """

    def __init__(self, trials: int, rounds: int, processes: int, say: Say) -> None:
        self.trials = trials
        self.rounds = rounds
        self.processes = processes
        self.say = say
        self._lock = threading.Lock()
        self._said = time.monotonic()
        self._seconds: list[float] = []  # of the trials of this call

    def round(self, number: int, played: int, accuracy: float) -> None:
        """Tell how far a trial is, unless a line was printed within the last minute.

        Args:
            number: Its number.
            played: The round, from 1.
            accuracy: Its mean validation accuracy in [0, 1].
        """
        with self._lock:
            if time.monotonic() - self._said >= EVERY:
                self._print(f"trial {number}: round {played}/{self.rounds}, validation {100 * accuracy:.2f} %")

    def ended(self, trial: TriedOptions, all_trials: Sequence[TriedOptions], seconds: float) -> None:
        """Tell how a trial ended.

        Args:
            trial: The trial.
            all_trials: All trials so far, with those of earlier calls.
            seconds: How long this call has played it.
        """
        with self._lock:
            self._seconds.append(seconds)
            outcome = f"{_outcome(trial)} with {_options(trial.options)}"
            self._print(f"trial {trial.number} {outcome} ({self._far(all_trials)})")

    def _far(self, trials: Sequence[TriedOptions]) -> str:
        """How many trials are done, the best of them, and how long the others will take."""
        done = [trial for trial in trials if trial.state in ("complete", "pruned")]
        complete = [trial for trial in done if trial.state == "complete" and trial.accuracy is not None]
        far = f"{len(done)} of {self.trials} done"
        if complete:
            best = max(complete, key=lambda trial: (trial.accuracy or 0.0, -trial.number))
            far += f", best {100 * (best.accuracy or 0.0):.2f} % by trial {best.number}"
        left = self.trials - len(done)
        if left > 0:
            mean = sum(self._seconds) / len(self._seconds)
            far += f", about {duration(mean * left / self.processes)} left"
        return far

    def _print(self, text: str) -> None:
        self._said = time.monotonic()
        self.say(text)


def _outcome(trial: TriedOptions) -> str:
    if trial.state == "pruned":
        return f"ended early after round {trial.rounds}"
    if trial.state == "complete" and trial.accuracy is not None:
        return f"done, validation {100 * trial.accuracy:.2f} %,"
    return "failed"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{path.rpartition('.')[2]}={option_text(value)}" for path, value in options.items())
