"""How long runs take: what earlier calls of a study have measured, at the pace of this one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pfl_lightning.study.definition.plan import Cell, Run
from pfl_lightning.study.runs.progress import Progress, read_progress
from pfl_lightning.study.timing.times_file import CellTime, read_times, update_times

__all__ = ["Times", "duration"]


@dataclass(frozen=True)
class _Underway:
    """A run that is being played.

    Attributes:
        began: When its process was started.
        rounds: Rounds that were played before.
    """

    began: float
    rounds: int


@dataclass
class Times:
    """What is known of how long the runs of each cell take.

    Attributes:
        before: Times from earlier calls, and of rounds that were timed, by path of the cell.
        now: Times of what this call has played, by path of the cell.
        rounds: Rounds that were played, by folder of the run.
        path: Where times are kept for the next call; ``None`` for nowhere.
    """

    before: dict[str, CellTime] = field(default_factory=dict)
    now: dict[str, CellTime] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    path: Path | None = None
    _underway: dict[str, _Underway] = field(default_factory=dict)
    _whole: dict[str, int] = field(default_factory=dict)  # rounds of runs that have ended in this call, by cell
    _probed: set[str] = field(default_factory=set)  # cells of which this call has timed one round

    # ------------------------------------------------------------------ what is learned

    def learn_all(self, runs: Sequence[Run]) -> None:
        """Take over what runs of earlier calls say of themselves."""
        for run in runs:
            progress = read_progress(run.progress_file)
            if progress is not None:
                known = self.before.get(str(run.cell.path))
                self.before[str(run.cell.path)] = CellTime(progress.seconds_per_round, known.around if known else None)
                self.rounds[str(run.folder)] = progress.round

    def leave_out(self, runs: Iterable[Run]) -> None:
        """Expect no rounds of runs, since others train for them."""
        for run in runs:
            self.rounds[str(run.folder)] = run.rounds

    def probed(self, cell: Cell, time: CellTime) -> None:
        """Take over the time of one round, played to know it.

        Args:
            cell: The cell.
            time: Seconds of the round and around it.
        """
        self.before[str(cell.path)] = time
        self._probed.add(str(cell.path))

    def start(self, run: Run, rounds: int) -> None:
        """Start the clock of a run.

        Args:
            run: The run.
            rounds: Rounds that were played before.
        """
        self._underway[str(run.folder)] = _Underway(time.monotonic(), rounds)
        self.rounds[str(run.folder)] = rounds

    def stop(self, run: Run) -> None:
        """Forget the clock of a run that has failed."""
        self._underway.pop(str(run.folder), None)

    def learn(self, run: Run, progress: Progress, *, done: bool = False) -> None:
        """Take over what a run says of itself.

        Args:
            run: The run.
            progress: What it says.
            done: Whether it has just ended, after all its rounds.
        """
        key, folder = str(run.cell.path), str(run.folder)
        known, underway = self.now.get(key), self._underway.get(folder)
        around = known.around if known is not None else None
        self.rounds[folder] = progress.round
        played = progress.round - underway.rounds if underway is not None else 0
        if underway is not None and not played and not done:
            return  # what an earlier process has said
        if underway is not None and done:
            around = max(time.monotonic() - underway.began - played * progress.seconds_per_round, 0.0)
            self._whole[key] = progress.round
            self.stop(run)
        self.now[key] = CellTime(progress.seconds_per_round, around)

    # ------------------------------------------------------------------ what is estimated

    def of_cell(self, cell: Cell) -> CellTime | None:
        """The time of a cell's runs; ``None`` where nothing is known.

        What this call has not measured is what earlier ones have, at the pace of this one, or else the mean of others.
        """
        key, pace = str(cell.path), self._pace()
        of_before = {name: CellTime(t.per_round * pace, _times(t.around, pace)) for name, t in self.before.items()}
        known = {**of_before, **self.now}
        if not known:
            return None
        arounds = {name: t.around for some in (of_before, self.now) for name, t in some.items() if t.around is not None}
        per_round = known[key].per_round if key in known else _mean(t.per_round for t in known.values())
        return CellTime(per_round, arounds[key] if key in arounds else _mean(arounds.values()))

    def _pace(self) -> float:
        """How many times as long a run takes in this call as in earlier ones."""
        now = before = 0.0
        for key, rounds in self._whole.items():
            if key in self.before:
                whole = self.before[key].around is not None
                now += self.now[key].of(rounds) if whole else rounds * self.now[key].per_round
                before += self.before[key].of(rounds)
        return now / before if before else 1.0

    def left(self, runs: Sequence[Run], processes: int) -> float:
        """Seconds until runs are done; 0 where nothing is known.

        Args:
            runs: Runs that are not done.
            processes: How many are played at once.
        """
        seconds = [self._left_of(run) for run in runs]
        return max(math.fsum(seconds) / max(min(processes, len(runs)), 1), max(seconds, default=0.0))

    def _left_of(self, run: Run) -> float:
        expected = self.of_cell(run.cell)
        if expected is None or not run.rounds:
            return 0.0
        played, around = self.rounds.get(str(run.folder), 0), expected.around or 0.0
        underway = self._underway.get(str(run.folder))
        if underway is not None:  # of the time around the rounds, some has gone
            gone = time.monotonic() - underway.began - (played - underway.rounds) * expected.per_round
            around = max(around - max(gone, 0.0), 0.0)
        return around + max(run.rounds - played, 0) * expected.per_round

    # ------------------------------------------------------------------ from call to call

    def save(self) -> None:
        """Keep the times of the cells for the next call, beside those of other calls on the same folder."""
        if self.path is not None:
            measured = {**{name: self.before[name] for name in self._probed}, **self.now}
            update_times(self.path, measured, self.before)

    @classmethod
    def load(cls, path: Path) -> Times:
        """Read the times of the cells, and keep them there; of a file that is missing or damaged, none."""
        return cls(read_times(path), path=path)


def _times(seconds: float | None, pace: float) -> float | None:
    return None if seconds is None else seconds * pace


def _mean(values: Iterable[float]) -> float:
    found = [*values]
    return math.fsum(found) / len(found) if found else 0.0


def duration(seconds: float) -> str:
    """A time in words.

    Example:
        >>> from pfl_lightning.study.timing.times import duration
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
