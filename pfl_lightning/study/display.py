"""What a study shows while it runs: bars on a terminal, or a line for each event, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from pfl_lightning.jobs.supervision import how_it_ended
from pfl_lightning.study.definition.plan import Run
from pfl_lightning.study.run_state import Progress, read_progress

__all__ = ["Display", "Rate", "duration"]

EVERY = 1.0
"""Seconds between readings of the runs' progress."""

LINE_EVERY = 60.0
"""Seconds between two lines on the runs under way, where there are no bars."""

SCORES = {"nearest_neighbor": "nearest-neighbor score"}
"""What a score is called that is no accuracy."""


class Display:
    """Shows how far the runs are, and tells what happens.

    Args:
        runs: All runs of the study.
        done: Names of those that are done.
        rate: How many rounds end in a second.
        console: Where it is shown.
    """

    def __init__(self, runs: Sequence[Run], done: Iterable[str], rate: Rate, console: Console) -> None:
        self.runs = runs
        self.done = set(done)
        self.rate = rate
        self.console = console
        self.active: dict[str, tuple[Run, TaskID]] = {}
        self.broken: set[str] = set()
        name, far = (TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[far]"))
        self.bars = Bars(name, BarColumn(), far, console=console, disable=not console.is_terminal)
        self._all = self.bars.add_task("runs", total=len(runs), far="")
        self._read, self._line = 0.0, time.monotonic()
        self._waited = False
        self._said: set[str] = set()

    def __enter__(self) -> Display:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._show()
        self.bars.stop()

    # ------------------------------------------------------------------ events

    def started(self, run: Run, resumed: bool, trained: Run | None = None) -> None:
        """Say that a run is started, or goes on, and after whose training."""
        progress = read_progress(run.progress_file) if resumed else None
        self.rate.start(run, progress.round if progress is not None else 0)
        self.active[run.name] = (run, self.bars.add_task(run.name, total=run.rounds or None, far=""))
        after = f" goes on after round {progress.round}" if progress else " goes on" if resumed else " started"
        whose = f" of {trained.name}, which trains alike" if trained is not None else ""
        self._say(f"{run.name}{after}{whose}")

    def finished(self, run: Run) -> None:
        """Say that a run is done, how good it is, and how long the others will take."""
        self._remove(run)
        self.done.add(run.name)
        self._say(f"{run.name} done{_scored(self._learn(run))} ({self.summary()})")

    def failed(self, run: Run, code: int, lines: str, again: bool) -> None:
        """Say why a run failed."""
        self._remove(run)
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
        self._show()
        if self.bars.disable and self.active and time.monotonic() - self._line >= LINE_EVERY:
            where = (f"{name}: {_far(run, read_progress(run.progress_file))}" for name, (run, _) in self.active.items())
            self._say(f"{'; '.join(where)} ({self.summary()})")

    def summary(self) -> str:
        """How many runs are done, and how long the others will take."""
        left = self.rate.left(run for run in self.runs if run.name not in self.done | self.broken)
        counts = f"{len(self.done)} of {len(self.runs)} done"
        counts += f", {len(self.active)} running" if self.active else ""
        counts += f", {len(self.broken)} failed" if self.broken else ""
        return counts + (f", about {duration(left)} left" if left else "")

    def _show(self) -> None:
        for run, bar in self.active.values():
            progress = self._learn(run)
            played = progress.round if progress is not None else 0
            self.bars.update(bar, completed=played, far=_far(run, progress))
        self.bars.update(self._all, completed=len(self.done), far=self.summary())

    def _learn(self, run: Run) -> Progress | None:
        progress = read_progress(run.progress_file)
        if progress is not None:
            self.rate.learn(run, progress.round)
        return progress

    def _remove(self, run: Run) -> None:
        if run.name in self.active:
            self.bars.remove_task(self.active.pop(run.name)[1])

    def _say(self, text: str) -> None:
        self._line = time.monotonic()
        self.console.print(f"{datetime.now():%H:%M:%S} {text}", highlight=False, markup=False)


def _far(run: Run, progress: Progress | None) -> str:
    """How far a run is, and how good."""
    return f"round {progress.round if progress is not None else 0}/{run.rounds or '?'}{_scored(progress)}"


def _scored(progress: Progress | None) -> str:
    """How good a run is, and by which parts of the data."""
    if progress is None:
        return ""
    part, score = ("validation", progress.validation) if progress.test is None else ("test", progress.test)
    return "" if score is None else f", {part} {SCORES.get(progress.score, 'accuracy')} {100 * score:.2f} %"


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
