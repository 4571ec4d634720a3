"""Writes reports: tables, notes and curves as files, and the table on a terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from pfl_lightning.report.curves import draw_curves, draw_single_clients
from pfl_lightning.report.formats import latex_table, markdown_table, rows_csv, runs_csv, terminal_table
from pfl_lightning.report.grouping import apart_by_data
from pfl_lightning.report.notes import caption, data_note, notes, search_note, without_note
from pfl_lightning.report.page import html_page
from pfl_lightning.report.rows import MeasuredRow, ReportSettings, Row, blocks, measure
from pfl_lightning.report.significance import PairedTests, Ranking, compare_with_reference, rank_rows
from pfl_lightning.report.tables import (
    Column,
    Fact,
    TextTable,
    block_columns,
    block_table,
    ranking_table,
    report_columns,
    significance_table,
    summary_table,
)
from pfl_lightning.state.files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


STUDY_NAMES = {"md": "table.md", "csv": "table.csv", "tex": "table.tex", "png": "curves.png", "html": "report.html"}
"""Names of a study's files, by format."""

FORMATS = tuple(STUDY_NAMES)


@dataclass(frozen=True)
class Report:
    """Measured rows and everything that is made of them.

    Attributes:
        rows: The rows.
        settings: What is shown.
    """

    rows: tuple[MeasuredRow, ...]
    settings: ReportSettings

    @cached_property
    def columns(self) -> list[Column]:
        """The figures that any run has."""
        return report_columns(self.rows, self.settings)

    @cached_property
    def blocks(self) -> dict[str, list[MeasuredRow]]:
        """The rows by setting."""
        return blocks(self.rows)

    @cached_property
    def tests(self) -> dict[str, list[PairedTests]]:
        """Paired tests by setting."""
        figure, reference = self.settings.figure, self.settings.reference
        return {name: compare_with_reference(rows, figure, reference) for name, rows in self.blocks.items()}

    @cached_property
    def ranking(self) -> Ranking | None:
        """Ranks over settings, where there are several."""
        return rank_rows(self.rows, self.settings.figure)

    @cached_property
    def by_score(self) -> dict[str, list[MeasuredRow]]:
        """The rows by the score of their headline; a row without runs is with others of its label, or the first."""
        figure = self.settings.figure
        known = {row.label: row.score(figure) for row in self.rows if row.runs}
        first = next(iter(known.values()), "classifier")
        found: dict[str, list[MeasuredRow]] = {}
        for row in self.rows:
            found.setdefault(row.score(figure) or known.get(row.label, first), []).append(row)
        return dict(sorted(found.items()))

    def main_tables(self, short: bool = False) -> list[list[TextTable]]:
        """For each score, a table for each setting; all tables of a score have the same columns.

        Args:
            short: See :func:`~pfl_lightning.report.tables.block_columns`.
        """
        found = []
        for score, rows in self.by_score.items():
            columns = block_columns(rows, self.settings, short)
            found.append([block_table(self._title(name, score), some, columns) for name, some in blocks(rows).items()])
        return found

    def _title(self, setting: str, score: str) -> str:
        """Of a block; where there are several scores, it says which one it shows."""
        what = {"nearest_neighbor": "nearest-neighbor scores", "metric": "no accuracies"}.get(score, f"{score} scores")
        return ": ".join(filter(None, [setting, what if len(self.by_score) > 1 else ""]))

    def summaries(self) -> list[TextTable]:
        """Methods by settings, for each score, where there are several settings."""
        if len(self.blocks) < 2:
            return []
        scores = [(rows, report_columns(rows, self.settings)) for rows in self.by_score.values()]
        return [summary_table(rows, column) for rows, columns in scores for column in columns if column.is_headline]

    def further_tables(self) -> list[TextTable]:
        """Paired tests for each setting that has some, and the ranking."""
        tested = [significance_table(name, tests) for name, tests in self.tests.items() if tests]
        return [*tested, *([] if self.ranking is None else [ranking_table(self.ranking)])]

    def tables(self) -> list[TextTable]:
        """All tables."""
        return [*self.summaries(), *chain.from_iterable(self.main_tables()), *self.further_tables()]

    def notes(self) -> list[str]:
        """What one must know to read the tables."""
        return notes(self.rows, self.columns, self.settings, self.tests, self.ranking)

    @cached_property
    def figure(self) -> Figure | None:
        """The curves."""
        return draw_curves(self.rows)

    def write(self, folder: Path, names: Mapping[str, str]) -> list[Path]:
        """Write the report.

        Args:
            folder: Where its files go.
            names: Names of the files, by format.

        Returns:
            The files.
        """
        folder.mkdir(parents=True, exist_ok=True)
        makers = {"md": self.markdown, "csv": self.csv, "tex": self.latex, "png": self.png, "html": self.html}
        written = []
        for form, name in names.items():
            contents: dict[Path, str | bytes | None] = {folder / name: makers[form]()}  # type: ignore[operator]
            if form == "csv":
                contents[folder / f"{Path(name).stem}_runs.csv"] = runs_csv(self.rows, self.columns)
            for path, content in contents.items():
                if content is None:  # a picture of an earlier report would stand beside this one's files
                    path.unlink(missing_ok=True)
                    continue
                with replace_file(path, shared=True) as temporary:  # other readers see the old one or the new one
                    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
                written.append(path)
        return written

    def markdown(self) -> str:
        """The report in Markdown."""
        parts = [f"# {self.settings.title}\n", *map(markdown_table, self.tables())]
        return "\n".join([*parts, *(f"{note}\n" for note in self.notes())])

    def csv(self) -> str:
        """The rows as plain numbers."""
        tests = {(name, test.label): test for name, some in self.tests.items() for test in some}
        return rows_csv(self.rows, self.columns, self.settings, tests)

    def latex(self) -> str:
        """The tables of a paper: methods by settings, fairness, significance, ranking; without bytes and seconds."""
        title, figures = self.settings.title, caption(self.rows, self.columns, self.settings)
        parts = [latex_table([table], f"{title}: {table.title}.") for table in self.summaries()]
        for tables in self.main_tables(short=True):
            sentences = [f"{_with_title(title, tables)}.", figures, search_note(self.rows)]
            parts.append(latex_table(tables, " ".join(filter(None, sentences))))
        for table in self.further_tables():
            tested = " p values are two-sided, with Holm's correction." if "Significance" in table.title else ""
            parts.append(latex_table([table], f"{title}: {table.title}.{tested}"))
        return "% needs \\usepackage{booktabs}\n" + "\n".join(parts)

    def png(self) -> bytes | None:
        """The curves as a picture."""
        figure, file = self.figure, io.BytesIO()
        if figure is None:
            return None
        figure.savefig(file, format="png", dpi=120)
        figure.set_layout_engine("none")  # the page's curves have the same
        return file.getvalue()

    def html(self) -> str:
        """The page."""
        figures = {"Curves": self.figure, "Curves of single clients (first seed)": draw_single_clients(self.rows)}
        drawn = {heading: figure for heading, figure in figures.items() if figure is not None}
        return html_page(self.settings.title, self.notes(), self.tables(), self.rows, drawn)


def _with_title(title: str, tables: Sequence[TextTable]) -> str:
    """The title, with the setting where there is one alone: several stand above their rows."""
    return ": ".join(filter(None, [title, tables[0].title if len(tables) == 1 else ""]))


def study_report(rows: Sequence[Row], settings: ReportSettings) -> Report:
    """The report of a study; rows with other data than the rest of their setting have tables of their own."""
    return Report(tuple(apart_by_data(measure(rows, settings))), settings)


def write_report(rows: Sequence[Row], folder: Path, settings: ReportSettings) -> list[Path]:
    """Write the report of a study: table.md, table.csv, table_runs.csv, table.tex, curves.png and report.html.

    Runs that have no results yet, or are not finished, are left out; the report says how many.

    Args:
        rows: Its rows.
        folder: Where its files go.
        settings: What it shows.

    Returns:
        The files.
    """
    return study_report(rows, settings).write(folder, STUDY_NAMES)


def live_table(rows: Sequence[Row], settings: ReportSettings) -> Table:
    """The headline of what is finished so far, for a terminal.

    Args:
        rows: The rows.
        settings: What is shown.
    """
    report = study_report(rows, settings)
    columns = [c for c in block_columns(report.rows, settings, short=True) if isinstance(c, Fact) or c.is_headline]
    tables = [block_table(name, some, columns) for name, some in report.blocks.items()]
    table = terminal_table(tables, _with_title(settings.title, tables))
    below = "\n".join(filter(None, [data_note(report.rows), without_note(report.rows, settings)]))
    table.caption, table.caption_justify = Text(below) if below else None, "left"
    return table
