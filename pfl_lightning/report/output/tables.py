"""The tables of a report, as texts: one of each setting, a summary, significance and ranking."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pfl_lightning.report.output.columns import Column
from pfl_lightning.report.ranking import Ranking
from pfl_lightning.report.rows import MeasuredRow, blocks
from pfl_lightning.report.significance import PairedTests

__all__ = [
    "Cell",
    "Shown",
    "TextTable",
    "block_table",
    "p_text",
    "ranking_table",
    "significance_table",
    "summary_table",
]


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


@dataclass(frozen=True)
class Shown:
    """What the table of a setting shows.

    Attributes:
        columns: The figures.
        facts: Which of ``"rounds"``, ``"clients"``, ``"model"`` (the evaluated one) and ``"search trials"`` (by which
            options were chosen) stand before them.
        published: Whether the published figures stand beside the headline.
        figure: The headline.
    """

    columns: tuple[Column, ...]
    facts: tuple[str, ...]
    published: bool
    figure: str


def block_table(title: str, rows: Sequence[MeasuredRow], shown: Shown) -> TextTable:
    """The rows of one setting.

    Args:
        title: Name of the setting.
        rows: Its rows.
        shown: What is shown of them.
    """
    headings = ["run", "seeds", *shown.facts]
    lines = [
        [Cell(row.label), Cell(_seeds(row)), *(_fact(row, name, shown.figure) for name in shown.facts)] for row in rows
    ]
    headlines = [column for column in shown.columns if column.is_headline]
    for column in shown.columns:
        headings.append(column.heading)
        for line, cell in zip(lines, _marked(rows, column), strict=True):
            line.append(cell)
        if shown.published and headlines and column is headlines[-1]:
            headings += ["published, %", "difference"]
            for line, row in zip(lines, rows, strict=True):
                line += _published(row, headlines)
    return TextTable(title, tuple(headings), tuple(map(tuple, lines)))


def _seeds(row: MeasuredRow) -> str:
    return str(len(row.runs)) if len(row.runs) == row.planned else f"{len(row.runs)} of {row.planned}"


def _fact(row: MeasuredRow, name: str, figure: str) -> Cell:
    if name == "search trials":
        return Cell(str(row.trials or 0))
    values = {
        "rounds": [str(run.rounds) for run in row.runs],
        "clients": [str(run.num_clients) for run in row.runs],
        "model": [run.evaluation(figure).model.replace("_", "-") or "-" for run in row.runs],
    }[name]
    return Cell(", ".join(dict.fromkeys(values)) or "-")


def _marked(rows: Sequence[MeasuredRow], column: Column) -> list[Cell]:
    means = [round(column.factor * column.over_seeds(row).mean, column.digits) for row in rows]
    known = [mean for mean in means if not math.isnan(mean)]
    best = max(known) if column.highest_is_best and len(known) > 1 else math.nan
    return [Cell(column.text(row), mean == best) for row, mean in zip(rows, means, strict=True)]


def _published(row: MeasuredRow, headlines: Sequence[Column]) -> list[Cell]:
    if row.published is None:
        return [Cell("-"), Cell("-")]
    means = [column.over_seeds(row).mean for column in headlines]  # of several scores, a row has one
    mean = next((mean for mean in means if not math.isnan(mean)), math.nan)
    difference = 100 * mean - row.published
    return [Cell(f"{row.published:.2f}"), Cell("-" if math.isnan(difference) else f"{difference:+.2f}")]


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
        cells = dict(zip((row.label for row in some), _marked(some, headline), strict=True))
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
    lines = [
        (
            *(Cell(test.label), Cell(test.reference), Cell(_signed(100 * test.difference))),
            *(Cell(str(test.seeds)), Cell(p_text(test.p_seeds)), Cell(str(test.clients)), Cell(p_text(test.p_clients))),
        )
        for test in tests
    ]
    headings = (
        *("run", "against", "difference, points", "pairs of seeds", "p (paired t-test over seeds)"),
        *("pairs of clients", "p (Wilcoxon over clients)"),
    )
    return TextTable("Significance" + (f": {setting}" if setting else ""), headings, tuple(lines))


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
    lines = [
        (Cell(label), Cell(f"{average:.2f}"), *(Cell(f"{rank:g}") for rank in ranks)) for label, average, ranks in rows
    ]
    title = f"Ranking over {len(ranking.settings)} settings"
    if not math.isnan(ranking.p_value):
        title += f" (Friedman's test that the methods do not differ: p = {p_text(ranking.p_value)})"
    return TextTable(title.replace("= <", "<"), ("run", "average rank", *ranking.settings), tuple(lines))
