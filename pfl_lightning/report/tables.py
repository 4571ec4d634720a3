"""The tables of a report, as texts: their columns; one of each setting, a summary, significance and ranking."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pfl_lightning.report.rows import MeasuredRow, ReportSettings, blocks, reach
from pfl_lightning.report.significance import PairedTests, Ranking
from pfl_lightning.runs.results import FIGURES, FinishedRun, number_of

SCORES = {"classifier": ("", ""), "nearest_neighbor": ("nearest_neighbor_", "nearest-neighbor ")}
"""Scores that are accuracies, each in columns of its own; what stands before their names, in files and in headings."""


@dataclass(frozen=True)
class Cell:
    """A text of a table.

    Attributes:
        text: The text.
        best: Whether it is the best of its column.
    """

    text: str
    best: bool = False


@dataclass(frozen=True)
class TextTable:
    """A table of texts; its first column names the lines.

    Attributes:
        title: What it shows; may be empty.
        headings: Of the columns.
        lines: The cells.
    """

    title: str
    headings: tuple[str, ...]
    lines: tuple[tuple[Cell, ...], ...]


def texts(title: str, headings: Iterable[str], lines: Iterable[Iterable[str]]) -> TextTable:
    """A table without best figures."""
    return TextTable(title, tuple(headings), tuple(tuple(map(Cell, line)) for line in lines))


@dataclass(frozen=True)
class Fact:
    """A text of a row.

    Attributes:
        heading: What people read above it.
        text: The text of a row.
    """

    heading: str
    text: Callable[[MeasuredRow], str]

    def cells(self, rows: Sequence[MeasuredRow]) -> list[Cell]:
        """What people read of rows."""
        return [Cell(self.text(row)) for row in rows]


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
        marks_best: Whether the row with the best mean is marked.
        is_detail: Whether a paper's table leaves it out.
    """

    name: str
    heading: str
    figure: Callable[[FinishedRun], float]
    factor: float = 1.0
    digits: int = 2
    is_headline: bool = False
    marks_best: bool = False
    is_detail: bool = False

    def text(self, row: MeasuredRow) -> str:
        """What people read of a row."""
        found = row.over_seeds(self.figure)
        if not found.count:
            return "not reached" if any(math.isinf(self.figure(run)) for run in row.runs) else "-"
        text = f"{self.factor * found.mean:,.{self.digits}f}"
        if not math.isnan(found.std):
            text += f" ± {self.factor * found.std:,.{self.digits}f}"
        return text if found.count == found.seeds else f"{text} ({found.count} of {found.seeds} seeds)"

    def cells(self, rows: Sequence[MeasuredRow]) -> list[Cell]:
        """What people read of rows, the best of several marked."""
        means = [round(self.factor * row.over_seeds(self.figure).mean, self.digits) for row in rows]
        known = [mean for mean in means if not math.isnan(mean)]
        extreme = min if any(row.sign < 0 for row in rows) else max
        best = extreme(known) if self.marks_best and len(known) > 1 else math.nan
        return [Cell(self.text(row), mean == best) for row, mean in zip(rows, means, strict=True)]


def report_columns(rows: Sequence[MeasuredRow], settings: ReportSettings) -> list[Column]:
    """The columns for which any row has a figure; the headline first.

    Args:
        rows: All rows of the report.
        settings: What it shows.
    """
    columns = [column for score in SCORES for column in _accuracies(score, settings)]
    columns += [
        Column("bytes_up", "MB up", lambda run: run.bytes_up, 1e-6, is_detail=True),
        Column("bytes_down", "MB down", lambda run: run.bytes_down, 1e-6, is_detail=True),
        Column("seconds_per_round", "s a round", lambda run: run.seconds_per_round, is_detail=True),
        Column("simulated_seconds", "simulated s", _simulated_seconds, digits=1),
    ]
    return [c for c in columns if any(not math.isnan(c.figure(run)) for row in rows for run in row.runs)]


def _simulated_seconds(run: FinishedRun) -> float:
    return number_of(run.history[-1].simulated_seconds) if run.history else math.nan


def _accuracies(score: str, settings: ReportSettings) -> list[Column]:
    """The columns of one score: the headline and its spread, further accuracies, and what it takes to the target."""
    prefix, what = SCORES[score]
    prefix += "" if settings.metric == "accuracy" else f"{settings.metric}_"
    bracket, headline, target = f" ({what.strip()})" if what else "", settings.figure, settings.target_accuracy

    def of(figure: str, statistic: str) -> Callable[[FinishedRun], float]:
        def value(run: FinishedRun) -> float:
            found = run.evaluation(figure)
            return float(getattr(found, statistic)) if found.score == score else math.nan

        return value

    def until(needed: str) -> Callable[[FinishedRun], float]:
        def value(run: FinishedRun) -> float:
            found = reach(run.history, target or 0, run.lower_is_better)
            return found[needed] if run.test.score == score else math.nan

        return value

    def accuracy(figure: str) -> Column:
        name = prefix + ("mean" if figure == "test" else figure)
        return Column(name, f"{what}{settings.figures[figure]}, %", of(figure, "mean"), 100)

    name, worst = prefix + ("" if headline == "test" else f"{headline}_"), of(headline, "worst_decile")
    found = [
        replace(accuracy(headline), is_headline=True, marks_best=True),
        Column(f"{name}std", f"std over clients{bracket}, %", of(headline, "std"), 100),
        Column(f"{name}worst_decile", f"worst decile{bracket}, %", worst, 100, marks_best=True),
        *(accuracy(figure) for figure in FIGURES if figure != headline),
    ]
    if target is not None:
        to = f"to {100 * target:.6g} %{' ' + what.strip() if what else ''}"
        found += [
            Column(f"{prefix}rounds_to_target", f"rounds {to}", until("rounds"), digits=1),
            Column(f"{prefix}megabytes_to_target", f"MB {to}", until("megabytes")),
            Column(f"{prefix}seconds_to_target", f"s {to}", until("seconds"), digits=1, is_detail=True),
            Column(f"{prefix}simulated_seconds_to_target", f"simulated s {to}", until("simulated_seconds"), digits=1),
        ]
    return found


def block_columns(rows: Sequence[MeasuredRow], settings: ReportSettings, short: bool = False) -> list[Column | Fact]:
    """What the table of a setting shows; the published figures stand beside the headline.

    Args:
        rows: Rows of one score.
        settings: What the report shows.
        short: Leave out what a paper's table does without: traffic, seconds, numbers of rounds and clients.
    """

    def of_runs(heading: str, text: Callable[[FinishedRun], str]) -> Fact:
        return Fact(heading, lambda row: ", ".join(dict.fromkeys(map(text, row.runs))) or "-")

    found: list[Column | Fact] = [Fact("run", lambda row: row.label), Fact("seeds", _seeds)]
    if not short:
        model = of_runs("model", lambda run: run.evaluation(settings.figure).model.replace("_", "-") or "-")
        found += [of_runs("rounds", lambda run: str(run.rounds)), of_runs("clients", lambda run: str(run.num_clients))]
        found += [model] if any(run.evaluation(settings.figure).model for row in rows for run in row.runs) else []
    if any(row.trials for row in rows):
        found.append(Fact("search trials", lambda row: str(row.trials or 0)))
    columns = [column for column in report_columns(rows, settings) if not (short and column.is_detail)]
    headlines = [column for column in columns if column.is_headline]
    for column in columns:
        found.append(column)
        if headlines and column is headlines[-1]:
            found += published_columns(rows, settings.figure)
    return found


def published_columns(rows: Sequence[MeasuredRow], figure: str) -> list[Fact]:
    """The published figures and the differences from them; none where no row has any."""

    def difference(row: MeasuredRow) -> str:
        return "-" if row.published is None else _signed(100 * row.headline(figure).mean - row.published)

    published = Fact("published, %", lambda row: "-" if row.published is None else f"{row.published:.2f}")
    known = any(row.published is not None for row in rows)
    return [published, Fact("difference", difference)] if known else []


def _seeds(row: MeasuredRow) -> str:
    return str(len(row.runs)) if len(row.runs) == row.planned else f"{len(row.runs)} of {row.planned}"


def block_table(title: str, rows: Sequence[MeasuredRow], columns: Sequence[Column | Fact]) -> TextTable:
    """The rows of one setting.

    Args:
        title: Name of the setting.
        rows: Its rows.
        columns: What is shown of them.
    """
    cells = [column.cells(rows) for column in columns]
    return TextTable(title, tuple(column.heading for column in columns), tuple(zip(*cells, strict=True)))


def summary_table(rows: Sequence[MeasuredRow], headline: Column) -> TextTable:
    """Methods by settings: the headline, with the published figure in parentheses.

    Args:
        rows: The rows of all settings.
        headline: The column that is shown.
    """
    by_setting = blocks(rows)
    labels = list(dict.fromkeys(row.label for row in rows))
    lines: list[list[Cell]] = [[Cell(label)] for label in labels]
    for some in by_setting.values():
        cells = dict(zip((row.label for row in some), headline.cells(some), strict=True))
        published = {row.label: row.published for row in some}
        for line, label in zip(lines, labels, strict=True):
            cell, paper = cells.get(label, Cell("-")), published.get(label)
            line.append(cell if paper is None else Cell(f"{cell.text} ({paper:.2f})", cell.best))
    title = f"{headline.heading}, by setting"
    if any(row.published is not None for row in rows):
        title += " (published figures in parentheses)"
    return TextTable(title, ("run", *by_setting), tuple(map(tuple, lines)))


def significance_table(setting: str, tests: Sequence[PairedTests]) -> TextTable:
    """Each row against the reference.

    Args:
        setting: Name of the block.
        tests: Its tests.
    """
    columns: dict[str, Callable[[PairedTests], str]] = {
        "run": lambda test: test.label,
        "against": lambda test: test.reference,
        "difference, points": lambda test: _signed(100 * test.difference),
        "pairs of seeds": lambda test: str(test.seeds),
        "p (paired t-test over seeds)": lambda test: p_text(test.p_seeds),
        "pairs of clients": lambda test: str(test.clients),
        "p (Wilcoxon over clients)": lambda test: p_text(test.p_clients),
    }
    title = "Significance" + (f": {setting}" if setting else "")
    return texts(title, columns, ([text(test) for text in columns.values()] for test in tests))


def _signed(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.2f}"


def p_text(value: float) -> str:
    """A p value as people read it.

    Example:
        >>> p_text(0.0421), p_text(1e-9), p_text(float("nan"))
        ('0.042', '< 0.001', '-')
    """
    if math.isnan(value):
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def ranking_table(ranking: Ranking) -> TextTable:
    """Ranks of the methods in each setting, and their average.

    Args:
        ranking: The ranking.
    """
    rows = zip(ranking.labels, ranking.averages, ranking.ranks, strict=True)
    title = f"Ranking over {len(ranking.settings)} settings"
    if not math.isnan(ranking.p_value):
        title += f" (Friedman's test that the methods do not differ: p = {p_text(ranking.p_value)})"
    lines = ([label, f"{average:.2f}", *(f"{rank:g}" for rank in ranks)] for label, average, ranks in rows)
    return texts(title.replace("= <", "<"), ("run", "average rank", *ranking.settings), lines)
