"""Columns of a report: the figures of a run, their headings and digits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pfl_lightning.report.rows import MeasuredRow, ReportSettings
from pfl_lightning.report.statistics import OverSeeds, Target, reach
from pfl_lightning.runs.results import FIGURES, FinishedRun

__all__ = ["Column", "percent", "report_columns"]

SCORES = {"classifier": "", "nearest_neighbor": "nearest-neighbor "}
"""Scores that are accuracies, each in columns of its own, and what stands before their names."""


@dataclass(frozen=True)
class Column:
    """A figure of a run.

    Attributes:
        name: Its name in the CSV file.
        heading: What people read.
        figure: The figure of a run: NaN where it has none, infinity where it was not reached.
        factor: Factor of what people read.
        digits: Digits after the point.
        is_headline: Whether it is the figure that the report is about.
        highest_is_best: Whether the row with the highest mean is marked.
        is_detail: Whether a paper's table leaves it out.
    """

    name: str
    heading: str
    figure: Callable[[FinishedRun], float]
    factor: float = 1.0
    digits: int = 2
    is_headline: bool = False
    highest_is_best: bool = False
    is_detail: bool = False

    def over_seeds(self, row: MeasuredRow) -> OverSeeds:
        """Mean and standard deviation over the seeds of a row, without the factor."""
        return row.over_seeds(self.figure)

    def text(self, row: MeasuredRow) -> str:
        """What people read of a row."""
        found = self.over_seeds(row)
        if not found.count:
            return "not reached" if any(math.isinf(self.figure(run)) for run in row.runs) else "-"
        text = f"{self.factor * found.mean:,.{self.digits}f}"
        if not math.isnan(found.std):
            text += f" ± {self.factor * found.std:,.{self.digits}f}"
        return text if found.count == found.seeds else f"{text} ({found.count} of {found.seeds} seeds)"


def percent(value: float) -> str:
    """A share as a percentage, without digits that say nothing.

    Example:
        >>> percent(0.8), percent(0.925)
        ('80 %', '92.5 %')
    """
    return f"{100 * value:.6g} %"


def report_columns(rows: Sequence[MeasuredRow], settings: ReportSettings) -> list[Column]:
    """The columns for which any row has a figure; the headline first.

    Args:
        rows: All rows of the report.
        settings: What it shows.
    """
    columns = []
    for score in SCORES:
        columns += _headline(settings.figure, score)
    for figure in FIGURES:
        if figure != settings.figure:
            columns += [_accuracy(figure, score) for score in SCORES]
    if settings.target_accuracy is not None:
        for score in SCORES:
            columns += _target(settings.target_accuracy, score)
    columns += [
        Column("bytes_up", "MB up", lambda run: run.bytes_up, 1e-6, is_detail=True),
        Column("bytes_down", "MB down", lambda run: run.bytes_down, 1e-6, is_detail=True),
        Column("seconds_per_round", "s a round", lambda run: run.seconds_per_round, is_detail=True),
    ]
    return [c for c in columns if any(not math.isnan(c.figure(run)) for row in rows for run in row.runs)]


def _names(figure: str, score: str) -> tuple[str, str]:
    """Of a figure's column: its name before that of a statistic, and its heading."""
    name = f"{score}_" if score != "classifier" else ""
    return f"{name}{figure}_" if figure != "test" else name, f"{SCORES[score]}{FIGURES[figure]}"


def _accuracy(figure: str, score: str, is_headline: bool = False) -> Column:
    name, heading = _names(figure, score)
    name = name.removesuffix("_") if figure != "test" else f"{name}mean"
    if not is_headline:
        return Column(name, f"{heading}, %", _of(figure, score, "mean"), 100)
    return Column(name, f"{heading}, %", _of(figure, score, "mean"), 100, is_headline=True, highest_is_best=True)


def _headline(figure: str, score: str) -> list[Column]:
    name, _ = _names(figure, score)
    what = f" ({SCORES[score].strip()})" if SCORES[score] else ""
    return [
        _accuracy(figure, score, is_headline=True),
        Column(f"{name}std", f"std over clients{what}, %", _of(figure, score, "std"), 100),
        Column(
            *(f"{name}worst_decile", f"worst decile{what}, %"),
            *(_of(figure, score, "worst_decile"), 100),
            highest_is_best=True,
        ),
    ]


def _of(figure: str, score: str, statistic: str) -> Callable[[FinishedRun], float]:
    def value(run: FinishedRun) -> float:
        found = run.evaluation(figure)
        return float(getattr(found, statistic)) if found.score == score else math.nan

    return value


def _target(accuracy: float, score: str) -> list[Column]:
    what = f"{percent(accuracy)}{' ' + SCORES[score].strip() if SCORES[score] else ''}"
    name = f"{score}_" if score != "classifier" else ""

    def value(attribute: str) -> Callable[[FinishedRun], float]:
        return lambda run: float(getattr(_reach(run, accuracy, score), attribute))

    return [
        Column(f"{name}rounds_to_target", f"rounds to {what}", value("rounds"), digits=1),
        Column(f"{name}megabytes_to_target", f"MB to {what}", value("megabytes")),
        Column(f"{name}seconds_to_target", f"s to {what}", value("seconds"), digits=1, is_detail=True),
    ]


def _reach(run: FinishedRun, accuracy: float, score: str) -> Target:
    if run.test.score != score:
        return Target(math.nan, math.nan, math.nan)
    return reach(run.history, accuracy)
