"""What a study shows while it runs: a line for each event, how far the runs are, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime

from rich.console import Console
from rich.text import Text

from pfl_lightning.jobs.supervision import how_it_ended
from pfl_lightning.study.plan import Run
from pfl_lightning.study.run_state import Progress, read_progress

__all__ = ["Display", "duration"]

EVERY = 1.0
"""Seconds between readings of the runs' progress."""

LINE_EVERY = 60.0
"""Seconds between two lines on the runs under way, where there is no terminal."""

SCORES = {"nearest_neighbor": "nearest-neighbor score"}
"""What a score is called that is no accuracy."""


class Display:
    """Tells what happens, how far the runs are, and how long the rest takes at the rate of rounds so far.

    Args:
        runs: All runs of the study.
        done: Names of those that are done.
        console: Where it is shown: at its end on a terminal, or else a line a minute.
    """

    def __init__(self, runs: Sequence[Run], done: set[str], console: Console) -> None:
        self.runs = runs
        self.done = done
        self.console = console
        self.active: dict[str, Run] = {}
        self.broken: set[str] = set()
        self._status = console.status("")
        self._read, self._line = 0.0, time.monotonic()
        self._waited = False
        self._said: set[str] = set()
        self._began: float | None = None
        self._played = 0  # rounds of this call
        known = {run.name: read_progress(run.progress_file) for run in runs}
        self._rounds = {name: 0 if found is None else found.round for name, found in known.items()}

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    # ------------------------------------------------------------------ events

    def started(self, run: Run, resumed: bool) -> None:
        """Say that a run is started, or goes on."""
        self._began = time.monotonic() if self._began is None else self._began
        progress = read_progress(run.progress_file) if resumed else None
        self._rounds[run.name] = progress.round if progress is not None else 0
        self.active[run.name] = run
        after = f" goes on after round {progress.round}" if progress else " goes on" if resumed else " started"
        self._say(f"{run.name}{after}")

    def finished(self, run: Run) -> None:
        """Say that a run is done, how good it is, and how long the others will take."""
        self.active.pop(run.name, None)
        self.done.add(run.name)
        self._say(f"{run.name} done{_scored(self._learn(run))} ({self.summary()})")

    def failed(self, run: Run, code: int, lines: str, again: bool) -> None:
        """Say why a run failed."""
        self.active.pop(run.name, None)
        if not again:
            self.broken.add(run.name)
        said = "as a run above" if lines in self._said else lines
        self._said.add(lines)
        again_too = ". It is tried again" if again else ""
        self._say(f"{run.name} {how_it_ended(code)}{again_too}{f': {said}' if lines else ''}\n  (log: {run.log})")

    def elsewhere(self, run: Run) -> None:
        """Say that another process plays what is left."""
        if not self._waited:
            self._waited = True
            self._say(f"waiting for runs that another process plays, such as {run.name}")

    def tick(self) -> None:
        """Show how far the runs are."""
        if time.monotonic() - self._read < EVERY:
            return
        self._read = time.monotonic()
        where = "; ".join(f"{name}: {self._far(run)}" for name, run in self.active.items())
        if self.console.is_terminal:
            self._status.update(Text(f"{where} ({self.summary()})"))
        elif self.active and time.monotonic() - self._line >= LINE_EVERY:
            self._say(f"{where} ({self.summary()})")

    def summary(self) -> str:
        """How many runs are done, and how long the others will take."""
        left = [run for run in self.runs if run.name not in self.done | self.broken]
        counts = f"{len(self.done)} of {len(self.runs)} done"
        counts += f", {len(self.active)} running" if self.active else ""
        counts += f", {len(self.broken)} failed" if self.broken else ""
        rounds = sum(max(run.rounds - self._rounds[run.name], 0) for run in left)
        if self._began is None or not rounds or not self._played:
            return counts
        return f"{counts}, about {duration(rounds * (time.monotonic() - self._began) / self._played)} left"

    def _learn(self, run: Run) -> Progress | None:
        """How far a run is; what it has played since the last look counts for the rate."""
        progress = read_progress(run.progress_file)
        if progress is not None:
            self._played += max(progress.round - self._rounds[run.name], 0)
            self._rounds[run.name] = progress.round
        return progress

    def _far(self, run: Run) -> str:
        """How far a run is, and how good."""
        progress = self._learn(run)
        return f"round {self._rounds[run.name]}/{run.rounds or '?'}{_scored(progress)}"

    def _say(self, text: str) -> None:
        self._line = time.monotonic()
        self.console.print(f"{datetime.now():%H:%M:%S} {text}", highlight=False, markup=False)


def _scored(progress: Progress | None) -> str:
    """How good a run is, and by which parts of the data."""
    if progress is None:
        return ""
    part, score = ("validation", progress.validation) if progress.test is None else ("test", progress.test)
    return "" if score is None else f", {part} {SCORES.get(progress.score, 'accuracy')} {100 * score:.2f} %"


def duration(seconds: float) -> str:
    """A time in words.

    Example:
        >>> from pfl_lightning.study.display import duration
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
