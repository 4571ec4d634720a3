"""How long a study will take: one round of each row is timed before it starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pfl_lightning.errors import FederationError
from pfl_lightning.study.definition.options import option_of, with_option
from pfl_lightning.study.definition.plan import Run, in_folder
from pfl_lightning.study.runs.processes import Starter
from pfl_lightning.study.runs.progress import read_progress
from pfl_lightning.study.runs.runner import Outcome, Runner, start_over
from pfl_lightning.study.runs.state import changed_options, is_in_use
from pfl_lightning.study.timing.times import Times
from pfl_lightning.study.timing.times_file import CellTime

__all__ = ["probe"]


def probe(
    runs: Sequence[Run], folder: Path, times: Times, starter: Starter, *, processes: int, threads: int
) -> Outcome:
    """Time one round of each cell whose time is not known.

    Args:
        runs: Runs that are not done.
        folder: Where the rounds are played, such as ``OUTPUT/probe``.
        times: What is known; the new times are added, and kept where it keeps them.
        starter: Starts the processes.
        processes: How many run at once.
        threads: Threads of each.

    Raises:
        FederationError: A run fails in its first round, such as for missing data.
    """
    firsts = {id(run.cell): run for run in reversed(runs) if str(run.cell.path) not in times.before}
    watcher = _Watcher(times)
    probes = [_short(run, folder / run.cell.path) for run in reversed(firsts.values())]
    for run in probes:
        if changed_options(run) and not is_in_use(run):
            start_over(run)
    return Runner(starter, watcher, processes=processes, threads=threads).play(probes)


def _short(run: Run, folder: Path) -> Run:
    rounds = option_of(run.config, "trainer.max_epochs", 1)
    config = with_option(run.config, "trainer.max_epochs", min(1, rounds) if isinstance(rounds, int) else 1)
    return Run(run.cell, run.seed, in_folder(config, folder), folder)


class _Watcher:
    """Takes the times of runs of one round."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self._started: dict[str, float] = {}

    def started(self, run: Run, resumed: bool, trained: Run | None = None) -> None:
        """Start the clock."""
        self._started[run.name] = time.monotonic()

    def finished(self, run: Run) -> None:
        """Take the time of the round, and that around it."""
        progress = read_progress(run.progress_file)
        per_round = progress.seconds_per_round if progress is not None else 0.0
        whole = time.monotonic() - self._started.get(run.name, time.monotonic())
        self.times.probed(run.cell, CellTime(per_round, max(whole - per_round, 0.0)))
        self.times.save()

    def failed(self, run: Run, code: int, lines: str, again: bool) -> None:
        """Refuse to start the study."""
        said = " ".join(line for line in lines.splitlines() if not line.startswith("(PFL_DEBUG"))
        raise FederationError(
            f"{run.cell.name} fails in its first round: {said.removeprefix('pfl: ')} (log: {run.log})"
        )

    def elsewhere(self, run: Run) -> None:
        """Another study takes the time, too."""

    def tick(self) -> None:
        """Nothing."""
