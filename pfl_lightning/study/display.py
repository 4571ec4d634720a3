"""What a study shows: events, how far its runs are, how long the rest will take, and the table of what is done."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from rich.console import Console

from pfl_lightning.jobs.supervision import how_it_ended
from pfl_lightning.runs.changes import listed_some
from pfl_lightning.study.plan import Run
from pfl_lightning.study.reader import Study
from pfl_lightning.study.runner import Progress, RunState, difference, finished_folder, read_progress, state_of

LINE_EVERY = 60.0
"""Seconds between two lines on the runs under way."""


class Display:
    """Tells what happens, how far the runs are, and how long the rest takes at the rate of rounds so far.

    Args:
        runs: All runs of the study.
        done: Names of those that are done.
        console: Where it is shown.
    """

    def __init__(self, runs: Sequence[Run], done: set[str], console: Console) -> None:
        self.runs = runs
        self.done = done
        self.console = console
        self.active: dict[str, Run] = {}
        self.broken: set[str] = set()
        self._line = time.monotonic()
        self._waited = False
        self._began: float | None = None
        self._before = sum(self._rounds().values())

    # ------------------------------------------------------------------ events

    def started(self, run: Run, resumed: bool) -> None:
        """Say that a run is started, or goes on."""
        self._began = time.monotonic() if self._began is None else self._began
        progress = read_progress(run.progress_file) if resumed else None
        self.active[run.name] = run
        after = f" resumes after round {progress.round}" if progress else " resumes" if resumed else " started"
        self._log(f"{run.name}{after}")

    def finished(self, run: Run) -> None:
        """Say that a run is done, how good it is, and how long the others will take."""
        self.active.pop(run.name, None)
        self.done.add(run.name)
        self._log(f"{run.name} done{_scored(read_progress(run.progress_file))} ({self.summary()})")

    def failed(self, run: Run, code: int, lines: str, again: bool) -> None:
        """Say why a run failed."""
        self.active.pop(run.name, None)
        if not again:
            self.broken.add(run.name)
        why = f": {lines}" if lines else ""
        again_too = ". It is tried again" if again else ""
        self._log(f"{run.name} {how_it_ended(code)}{again_too}{why}\n  (log: {run.log})")

    def elsewhere(self, run: Run) -> None:
        """Say that another process plays what is left."""
        if not self._waited:
            self._waited = True
            self._log(f"waiting for runs of another process, such as {run.name}")

    def tick(self) -> None:
        """Say how far the runs are, a minute after the last line."""
        if self.active and time.monotonic() - self._line >= LINE_EVERY:
            known = {name: (run.rounds or "?", read_progress(run.progress_file)) for name, run in self.active.items()}
            far = {name: f"{0 if p is None else p.round}/{rounds}{_scored(p)}" for name, (rounds, p) in known.items()}
            where = (f"{name}: round {round}" for name, round in far.items())
            self._log(f"{'; '.join(where)} ({self.summary()})")

    def summary(self) -> str:
        """How many runs are done, and how long the others will take."""
        counts = f"{len(self.done)} of {len(self.runs)} done"
        counts += f", {len(self.active)} running" if self.active else ""
        counts += f", {len(self.broken)} failed" if self.broken else ""
        done = self._rounds()
        waiting = [run for run in self.runs if run.name not in self.done | self.broken]
        rounds, played = sum(max(run.rounds - done[run.name], 0) for run in waiting), sum(done.values()) - self._before
        if self._began is None or not rounds or played <= 0:
            return counts
        left = timedelta(seconds=round(rounds * (time.monotonic() - self._began) / played))
        return f"{counts}, about {left} left"

    def _rounds(self) -> dict[str, int]:
        """How many rounds each run has."""
        known = {run.name: read_progress(run.progress_file) for run in self.runs}
        return {name: 0 if found is None else found.round for name, found in known.items()}

    def _log(self, text: str) -> None:
        self._line = time.monotonic()
        self.console.print(f"{datetime.now():%H:%M:%S} {text}", highlight=False, markup=False)


def _scored(progress: Progress | None) -> str:
    """How good a run is, and by which parts of the data."""
    if progress is None:
        return ""
    part, score = ("validation", progress.validation) if progress.test is None else ("test", progress.test)
    what = "nearest-neighbor score" if progress.score == "nearest_neighbor" else "accuracy"
    return "" if score is None else f", {part} {what} {100 * score:.2f} %"


# ---------------------------------------------------------------------- the table of what is done


def print_tables(
    study: Study, runs: Sequence[Run], output: Path, console: Console, failed: Mapping[str, str] | None = None
) -> None:
    """Write the tables and curves of the finished runs to the study's folder, and print the table.

    Args:
        study: The study.
        runs: Its runs, of which some may be missing.
        output: Its folder.
        console: Where the table is printed.
        failed: Why runs have just failed, by name.
    """
    from pfl_lightning import report

    folders = {run.name: found for run in runs if state_of(run) is RunState.DONE and (found := finished_folder(run))}
    missing: dict[tuple[str, str], list[int]] = {}
    for run in runs:
        if run.name not in folders:
            changed = f"made with other options: {difference(run)}"
            whys = {"changed": changed, "to search": "not searched yet", "unfinished": "not finished", "new": ""}
            why = (failed or {}).get(run.name) or whys[state_of(run).value]
            missing.setdefault((run.cell.name, why), []).append(run.seed)
    names = [
        f"{name}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}{f' ({why})' if why else ''}"
        for (name, why), seeds in missing.items()
    ]
    note = f"Missing: {'; '.join(names)}." if names else ""
    if not folders:
        console.print(f"no run is finished: there is no table yet. {note}", highlight=False, markup=False)
        return
    settings = report.ReportSettings(
        title=study.title + (f" (scale {study.scale})" if study.scale else ""),
        choice=study.choice,
        figure=study.figure,
        metric=study.metric,
        target_accuracy=study.target_accuracy,
        source=study.published.source,
        note=note,
    )
    cells: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.cell.setting, run.cell.label), []).append(run)
    rows = [
        report.Row(
            label,
            setting,
            tuple(folders[run.name] for run in some if run.name in folders),
            published=study.published.figures.get(setting, {}).get(label),
            planned=len(some),
            trials=some[0].cell.search.trials if some[0].cell.search is not None else 0,
        )
        for (setting, label), some in cells.items()
    ]
    written = ", ".join(path.name for path in report.write_report(rows, output, settings))
    console.print(report.live_table(rows, settings))
    for line in filter(None, (note, f"Written to {output}: {written}")):
        console.print(line, highlight=False, markup=False)


def by_options(changed: Sequence[Run]) -> str:
    """A line for all runs in which the same options differ.

    Args:
        changed: The runs.
    """
    names: dict[str, list[str]] = {}
    for run in changed:
        names.setdefault(difference(run), []).append(run.name)
    return "\n".join(f"{listed_some(some)}: {options}" for options, some in names.items())
