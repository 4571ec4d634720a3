"""How long the runs of a study will take, by the rate at which this call plays their rounds."""

from __future__ import annotations

import time
from collections.abc import Iterable

from pfl_lightning.study.definition.plan import Run
from pfl_lightning.study.runs.progress import read_progress

__all__ = ["Rate", "duration"]


class Rate:
    """Rounds a second of all runs that this call plays, those played at once included.

    Args:
        runs: All runs of the study; rounds of earlier calls are read from their files.
        repeated: Runs whose rounds others train for them.
    """

    def __init__(self, runs: Iterable[Run], repeated: Iterable[Run] = ()) -> None:
        self._played = {run.name: run.rounds for run in repeated}
        for run in runs:
            progress = read_progress(run.progress_file)
            if progress is not None:
                self._played[run.name] = progress.round
        self._began: float | None = None
        self._rounds = 0

    def start(self, run: Run, rounds: int) -> None:
        """Take over how many rounds of a run were played before it was started."""
        self._began = time.monotonic() if self._began is None else self._began
        self._played[run.name] = rounds

    def learn(self, run: Run, rounds: int) -> None:
        """Take over how many rounds of a run have been played."""
        self._rounds += max(rounds - self._played.get(run.name, 0), 0)
        self._played[run.name] = rounds

    def left(self, runs: Iterable[Run]) -> float:
        """Seconds until runs are done; 0 where nothing is known.

        Args:
            runs: Runs that are not done.
        """
        if self._began is None or not self._rounds:
            return 0.0
        rounds = sum(max((run.rounds or 0) - self._played.get(run.name, 0), 0) for run in runs)
        return rounds * (time.monotonic() - self._began) / self._rounds


def duration(seconds: float) -> str:
    """A time in words.

    Example:
        >>> from pfl_lightning.study.timing import duration
        >>> duration(42), duration(200), duration(5000), duration(300000)
        ('42 s', '3 min', '1 h 23 min', '3 days 11 h')
    """
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // (24 * 60)} days {minutes % (24 * 60) // 60} h"
