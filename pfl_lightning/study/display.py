"""What a study shows while it runs: a live table on a terminal, or a line for each event."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pfl_lightning.jobs.supervision import how_it_ended
from pfl_lightning.study.definition.plan import Run
from pfl_lightning.study.runs.progress import Progress, read_progress
from pfl_lightning.study.timing import Rate, duration

__all__ = ["Display"]

EVERY = 1.0
"""Seconds between readings of the runs' progress."""

LINE_EVERY = 60.0
"""Seconds between two lines on the runs that are being played, where there is no live table."""

LONGEST = 30
"""Rows of the live table; of a larger study those that are being played are shown."""


@dataclass
class Display:
    """Shows how far the runs are, and tells what happens.

    Attributes:
        runs: All runs of the study.
        done: Those that are done.
        rate: How many rounds end in a second.
        console: Where it is shown.
        active: Runs that are being played, by name.
        broken: Names of runs that failed.
    """

    runs: Sequence[Run]
    done: set[str]
    rate: Rate
    console: Console = field(default_factory=lambda: Console(soft_wrap=True))
    active: dict[str, Run] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    _live: Live | None = None
    _read: float = 0.0
    _line: float = field(default_factory=time.monotonic)
    _waited: bool = False
    _said: set[str] = field(default_factory=set)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._live = Live(self.table(), console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.update(self.table(), refresh=True)
            self._live.stop()

    # ------------------------------------------------------------------ events

    def started(self, run: Run, resumed: bool, trained: Run | None = None) -> None:
        """Say that a run was started, or goes on, and after whose training."""
        self.active[run.name] = run
        progress = read_progress(run.progress_file) if resumed else None
        self.rate.start(run, progress.round if progress is not None else 0)
        after = f" goes on after round {progress.round}" if progress else " goes on" if resumed else " started"
        whose = f" of {trained.name}, which trains alike" if trained is not None else ""
        self._say(f"{run.name}{after}{whose}")

    def finished(self, run: Run) -> None:
        """Say that a run is done, how good it is, and how long the others will take."""
        self.active.pop(run.name, None)
        self.done.add(run.name)
        progress = read_progress(run.progress_file)
        if progress is not None:
            self.rate.learn(run, progress.round)
        self._say(f"{run.name} done{_scored(progress)} ({self.summary()})")

    def failed(self, run: Run, code: int, lines: str, again: bool) -> None:
        """Say why a run failed."""
        self.active.pop(run.name, None)
        if not again:
            self.broken.add(run.name)
        if lines and lines in self._said:
            lines = "as a run above"
        self._said.add(lines)
        said = f": {lines}" if lines else ""
        again_too = ". It is tried again" if again else ""
        self._say(f"{run.name} {how_it_ended(code)}{again_too}{said}\n  (log: {run.log})")

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
        for run in self.active.values():
            progress = read_progress(run.progress_file)
            if progress is not None:
                self.rate.learn(run, progress.round)
        if self._live is not None:
            self._live.update(self.table(), refresh=True)
        elif self.active and time.monotonic() - self._line >= LINE_EVERY:
            self._say(f"{'; '.join(map(_where, self.active.values()))} ({self.summary()})")

    def _say(self, text: str) -> None:
        self._line = time.monotonic()
        self.console.print(f"{datetime.now():%H:%M:%S} {text}", highlight=False, markup=False)

    # ------------------------------------------------------------------ the table

    def summary(self) -> str:
        """How many runs are done, and how long the others will take."""
        left = self.rate.left(run for run in self.runs if self._is_open(run))
        counts = f"{len(self.done)} of {len(self.runs)} done"
        counts += f", {len(self.active)} running" if self.active else ""
        counts += f", {len(self.broken)} failed" if self.broken else ""
        return counts + (f", about {duration(left)} left" if left else "")

    def _is_open(self, run: Run) -> bool:
        return run.name not in self.done and run.name not in self.broken

    def table(self) -> Table:
        """A row for each cell: how many seeds are done, what is being played, and the accuracy so far."""
        cells: dict[int, list[Run]] = {}
        for run in self.runs:
            cells.setdefault(id(run.cell), []).append(run)
        groups = list(cells.values())
        if len(groups) > LONGEST:
            groups = [group for group in groups if any(run.name in self.active for run in group)]
        table = Table(title=self.summary(), title_justify="left")
        settings = any(run.cell.setting for run in self.runs)
        for column in (*(("setting",) if settings else ()), "row"):
            table.add_column(column)
        for column in ("seeds done", "running", "accuracy so far"):
            table.add_column(column, justify="right")
        for group in groups:
            cell = group[0].cell
            names = (cell.setting, cell.label) if settings else (cell.label,)
            table.add_row(*map(Text, names), *self._figures(group))  # brackets in a name are no markup
        return table

    def _figures(self, runs: Sequence[Run]) -> tuple[str, ...]:
        done = [run for run in runs if run.name in self.done]
        playing = [run for run in runs if run.name in self.active]
        failed = sum(run.name in self.broken for run in runs)
        progress = {run.name: read_progress(run.progress_file) for run in playing or done}
        found = [accuracy for one in progress.values() if (accuracy := _accuracy(one)) is not None]
        kinds = {kind for one in progress.values() if (kind := _score(one)) != "accuracy"}
        note = f" ({', '.join(sorted(kinds))})" if kinds else ""
        return (
            f"{len(done)}/{len(runs)}" + (f", {failed} failed" if failed else ""),
            "\n".join(_round(run, progress[run.name]) for run in playing),
            f"{_percent(sum(found) / len(found))}{note}" if found else "",
        )


def _round(run: Run, progress: Progress | None) -> str:
    played = progress.round if progress is not None else 0
    return f"seed {run.seed}: round {played}/{run.rounds or '?'}"


def _where(run: Run) -> str:
    """How far a run is, and how good."""
    progress = read_progress(run.progress_file)
    return f"{run.name}: round {progress.round if progress is not None else 0}/{run.rounds or '?'}{_scored(progress)}"


def _scored(progress: Progress | None) -> str:
    """How good a run is, and by which parts of the data."""
    if progress is None or _accuracy(progress) is None:
        return ""
    part = "test" if progress.test is not None else "validation"
    return f", {part} {_score(progress)} {_percent(_accuracy(progress))}"


def _accuracy(progress: Progress | None) -> float | None:
    if progress is None:
        return None
    return progress.test if progress.test is not None else progress.validation


def _score(progress: Progress | None) -> str:
    """What the accuracy is one of."""
    names = {"nearest_neighbor": "nearest-neighbor score"}
    return names.get(progress.score, "accuracy") if progress is not None else "accuracy"


def _percent(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{100 * accuracy:.2f} %"
