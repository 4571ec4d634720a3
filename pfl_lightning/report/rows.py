"""Rows of a table: the runs of one method under one setting, one for each seed, and figures over seeds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pfl_lightning.checks import check_choice
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.runs.files import PERSONALIZED, RESULTS
from pfl_lightning.runs.reading import read_run
from pfl_lightning.runs.results import CHOICES, FIGURES, FinishedRun, HistoryEntry


@dataclass(frozen=True)
class Row:
    """A row of a table: one method under one setting.

    Attributes:
        label: What the table calls it, such as "FedPAC".
        setting: The block of the table that it stands in; empty where there is one only.
        runs: Folders of its runs, one for each seed; those without results yet count as missing.
        published: The paper's figure in %, if any.
        planned: Number of runs that it is to have; ``None`` for those whose folders are given.
        trials: Number of trials of the search by which its options were chosen; 0 for options that were given.
    """

    label: str
    setting: str
    runs: tuple[Path, ...]
    published: float | None = None
    planned: int | None = None
    trials: int = 0


@dataclass(frozen=True)
class ReportSettings:
    """Settings of a report.

    Attributes:
        title: Its title.
        choice: Which round's accuracies: ``"last"``, ``"validation_selected"`` or ``"best_test"``.
        figure: The headline: ``"test"``, ``"personalized"`` or ``"personalized_novel"``.
        metric: What stands in the place of accuracy.
        target_accuracy: Mean test accuracy, in [0, 1]: the table has the rounds, megabytes and seconds to it.
        source: Where the published figures are from.
        note: Text below the table.
        reference: Label of the row that the others are compared with; the best of each block if empty.

    Raises:
        ConfigurationError: A value is not one of those that are known.
    """

    title: str
    choice: str = "last"
    figure: str = "test"
    metric: str = "accuracy"
    target_accuracy: float | None = None
    source: str = ""
    note: str = ""
    reference: str = ""

    @property
    def figures(self) -> dict[str, str]:
        """Figures of a run by name, and what they are called."""
        return {name: text.replace("accuracy", self.metric.replace("_", " ")) for name, text in FIGURES.items()}

    def __post_init__(self) -> None:
        """Check the names."""
        check_choice("choice", self.choice, CHOICES)
        check_choice("figure", self.figure, tuple(FIGURES))
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise ConfigurationError(f"target_accuracy must be above 0 and at most 1, got {self.target_accuracy}")


@dataclass(frozen=True)
class MeasuredRow:
    """A row with the results of its runs.

    Attributes:
        label: What the table calls it.
        setting: The block of the table that it stands in.
        runs: Its finished runs, one for each seed.
        planned: Number of runs that it is to have.
        published: The paper's figure in %, if any.
        trials: Number of trials of the search by which its options were chosen; 0 for options that were given, ``None``
            where nobody knows.
        without: Number of finished runs that are left out, because they do not have the headline's results.
        of_setting: The study's setting, where the block has a part of its rows; otherwise ``None``.
    """

    label: str
    setting: str
    runs: tuple[FinishedRun, ...]
    planned: int
    published: float | None = None
    trials: int | None = 0
    without: int = 0
    of_setting: str | None = None

    @property
    def name(self) -> str:
        """Its label, with the setting where there are several."""
        return f"{self.label} ({self.setting})" if self.setting else self.label

    @property
    def sign(self) -> int:
        """1 where the highest figure is the best one, -1 where the lowest is."""
        return -1 if self.runs and self.runs[0].lower_is_better else 1

    def over_seeds(self, figure: Callable[[FinishedRun], float]) -> OverSeeds:
        """Mean and standard deviation over seeds of a figure of a run."""
        return over_seeds([figure(run) for run in self.runs])

    def score(self, figure: str) -> str:
        """Which score the figure is; empty without runs."""
        return self.runs[0].evaluation(figure).score if self.runs else ""

    def headline(self, figure: str) -> OverSeeds:
        """Mean over clients of the accuracies of a figure, over seeds."""
        return self.over_seeds(lambda run: run.evaluation(figure).mean)


def measure(rows: Sequence[Row], settings: ReportSettings) -> list[MeasuredRow]:
    """Read the runs of rows; runs without the headline's results, and unfinished ones, are left out as missing."""
    found = []
    for row in rows:
        runs, without = [], 0
        for folder in row.runs:
            if not any((folder / name).is_file() for name in (RESULTS, PERSONALIZED)):
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # the row says how many are missing
                    run = read_run(folder, settings.choice, settings.metric)
            except ConfigurationError as error:
                warnings.warn(f"left out of the table: {error}", stacklevel=2)
                continue
            if run.finished and _has_figure(run, settings.figure):
                runs.append(run)
            else:
                without += run.finished
        planned = len(row.runs) if row.planned is None else row.planned
        found.append(MeasuredRow(row.label, row.setting, tuple(runs), planned, row.published, row.trials, without))
    return found


def _has_figure(run: FinishedRun, figure: str) -> bool:
    metric = figure == "test" and run.test.score == "metric"  # such runs have no accuracies
    return metric or not math.isnan(run.evaluation(figure).mean)


def with_figure(row: MeasuredRow, figure: str) -> MeasuredRow:
    """A row without its runs that lack a figure, which would leave it without a mean; as it is where all lack it.

    Args:
        row: The row.
        figure: The figure, such as ``"personalized"``.
    """
    runs = tuple(run for run in row.runs if _has_figure(run, figure))
    return replace(row, runs=runs, planned=len(runs), without=row.without + len(row.runs) - len(runs)) if runs else row


def blocks(rows: Sequence[MeasuredRow]) -> dict[str, list[MeasuredRow]]:
    """Rows by setting, in the order in which the settings first appear."""
    found: dict[str, list[MeasuredRow]] = {}
    for row in rows:
        found.setdefault(row.setting, []).append(row)
    return found


@dataclass(frozen=True)
class OverSeeds:
    """A figure over the seeds of a row.

    Attributes:
        mean: Mean over the seeds that have the figure; NaN where none has it, or one does not know it.
        std: Standard deviation over them (of a sample); NaN of fewer than two.
        count: How many seeds have the figure.
        seeds: How many seeds there are.
    """

    mean: float
    std: float
    count: int
    seeds: int


def over_seeds(values: Sequence[float]) -> OverSeeds:
    """Mean and standard deviation over seeds.

    Args:
        values: The figure of each seed; NaN where it is not known, infinity where it was not reached.

    Example:
        >>> over_seeds([0.5, 0.75])
        OverSeeds(mean=0.625, std=0.1767766952966369, count=2, seeds=2)
        >>> over_seeds([12.0, math.inf])  # one of two seeds reached the target
        OverSeeds(mean=12.0, std=nan, count=1, seeds=2)
    """
    if any(math.isnan(value) for value in values):
        return OverSeeds(math.nan, math.nan, 0, len(values))
    found = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
    mean = float(found.mean()) if len(found) else math.nan
    std = float(found.std(ddof=1)) if len(found) > 1 else math.nan
    return OverSeeds(mean, std, len(found), len(values))


ROUNDING = 1e-9
"""By how much a mean of shares of samples may be off: 0.9 is not always the mean of shares whose mean is 0.9."""


def reach(history: Sequence[HistoryEntry], target: float, lower_is_better: bool = False) -> dict[str, float]:
    """Rounds, megabytes in both directions, and seconds until a run's mean test accuracy was at a target.

    They are infinite where it never was, NaN where they are not known.

    Args:
        history: The evaluated rounds, in order.
        target: Mean test accuracy over clients, in [0, 1].
        lower_is_better: Whether it is a metric that falls to the target.

    Example:
        >>> reach([HistoryEntry(5, test=0.4, bytes_up=10**6, bytes_down=2 * 10**6), HistoryEntry(10, test=0.6)], 0.4)
        {'rounds': 5.0, 'megabytes': 3.0, 'seconds': nan, 'simulated_seconds': nan}
    """
    figures = ("rounds", "megabytes", "seconds", "simulated_seconds")
    means, simulated = _column(history, "test"), _column(history, "simulated_seconds")
    if np.isnan(means).all():
        return dict.fromkeys(figures, math.nan)
    sign = -1 if lower_is_better else 1
    reached = np.flatnonzero(sign * means >= sign * target - ROUNDING)
    if not len(reached):
        return {**dict.fromkeys(figures, math.inf), "simulated_seconds": math.inf + float(simulated[-1])}
    first, seconds = reached[0], np.cumsum(_column(history, "seconds"))
    found = (float(history[first].round), _megabytes(history)[first], seconds[first], simulated[first])
    return dict(zip(figures, map(float, found), strict=True))


def _column(history: Sequence[HistoryEntry], name: str) -> NDArray[np.float64]:
    """A figure of the rounds; NaN where it is not known."""
    return np.array([getattr(entry, name) for entry in history], dtype=np.float64)


def _megabytes(history: Sequence[HistoryEntry]) -> NDArray[np.float64]:
    """Megabytes in both directions until the end of each round."""
    return np.cumsum(_column(history, "bytes_up") + _column(history, "bytes_down")) / 1e6


def learning_curve(runs: Sequence[FinishedRun]) -> list[tuple[int, float, float, float, float]]:
    """Round, megabytes, simulated seconds, mean and standard deviation over seeds of the test accuracy.

    Of rounds that every seed has. Megabytes in both directions and seconds up to the round are means over seeds; NaN
    where unknown.
    """
    curves = []
    for run in runs:
        columns = _megabytes(run.history), *(_column(run.history, name) for name in ("simulated_seconds", "test"))
        entries = zip(run.history, *(column.tolist() for column in columns), strict=True)
        curves.append({entry.round: figures for entry, *figures in entries if not math.isnan(figures[-1])})
    common = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    found = []
    for round in common:
        sizes, seconds, values = np.array([curve[round] for curve in curves]).T
        spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        found.append((round, float(sizes.mean()), float(seconds.mean()), float(values.mean()), spread))
    return found
