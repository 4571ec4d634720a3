"""Writes reports: tables, notes and curves as files, and the table on a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pfl_lightning.report.curves import draw_curves
from pfl_lightning.report.formats import fits, latex_table, markdown_table, rows_csv, runs_csv, terminal_table
from pfl_lightning.report.grouping import apart_by_data
from pfl_lightning.report.notes import (
    FAIRNESS,
    data_note,
    idle_note,
    ranking_note,
    reference_note,
    round_note,
    search_note,
    without_note,
)
from pfl_lightning.report.page import html_page
from pfl_lightning.report.ranking import rank_rows
from pfl_lightning.report.rows import MeasuredRow, ReportSettings, Row, blocks, measure
from pfl_lightning.report.significance import CAVEAT, PairedTests, compare_with_reference
from pfl_lightning.report.tables import (
    Column,
    TextTable,
    block_columns,
    block_table,
    ranking_table,
    report_columns,
    significance_table,
    summary_table,
)
from pfl_lightning.runs.results import FIGURES
from pfl_lightning.state.files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FORMATS", "SEPARATE", "STUDY_NAMES", "Report", "live_table", "write_report"]

FORMATS = ("md", "csv", "tex", "png", "html")
"""Forms in which a report is written."""

SEPARATE = "The runs are of several settings, data sets or partitions: each has a table of its own."
"""The note below tables that would mix data."""

STUDY_NAMES = {"md": "table.md", "csv": "table.csv", "tex": "table.tex", "png": "curves.png", "html": "report.html"}
"""Names of a study's files, by format."""


@dataclass(frozen=True)
class Report:
    """Measured rows and everything that is made of them.

    Attributes:
        rows: The rows.
        settings: What is shown.
        about: Notes about where the rows are from.
    """

    rows: tuple[MeasuredRow, ...]
    settings: ReportSettings
    about: tuple[str, ...] = ()

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
        settings = self.settings
        return {
            name: compare_with_reference(rows, settings.figure, settings.reference)
            for name, rows in self.blocks.items()
        }

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
            short: Leave out what a paper's table does without: traffic, seconds, numbers of rounds and clients.
        """
        found = []
        for score, rows in self.by_score.items():
            columns = [c for c in report_columns(rows, self.settings) if not (short and c.is_detail)]
            models = not short and any(run.evaluation(self.settings.figure).model for row in rows for run in row.runs)
            facts: tuple[str, ...] = () if short else ("rounds", "clients")
            facts += ("model",) if models else ()
            facts += ("search trials",) if any(row.trials for row in self.rows) else ()
            published = any(row.published is not None for row in rows)
            some = blocks(rows).items()
            shown = block_columns(columns, self.settings.figure, facts, published)
            found.append([block_table(self._title(name, score), rows, shown) for name, rows in some])
        return found

    def _title(self, setting: str, score: str) -> str:
        """Of a block; where there are several scores, it says which one it shows."""
        what = {"nearest_neighbor": "nearest-neighbor scores", "metric": "no accuracies"}.get(score, f"{score} scores")
        return ": ".join(filter(None, [setting, what if len(self.by_score) > 1 else ""]))

    def summaries(self) -> list[TextTable]:
        """Methods by settings, for each score, where there are several settings."""
        scores = [(rows, report_columns(rows, self.settings)) for rows in self.by_score.values()]
        found = [summary_table(rows, column) for rows, columns in scores for column in columns if column.is_headline]
        return found if len(self.blocks) > 1 else []

    def further_tables(self) -> list[TextTable]:
        """Significance and ranking, as far as there is something to say."""
        return [*self.significance_tables(), *self.ranking_tables()]

    def significance_tables(self) -> list[TextTable]:
        """A table of paired tests for each setting that has some."""
        return [significance_table(name, tests) for name, tests in self.tests.items() if tests]

    def ranking_tables(self) -> list[TextTable]:
        """The ranking over settings, where there are several."""
        ranking = rank_rows(self.rows, self.settings.figure)
        return [] if ranking is None else [ranking_table(ranking)]

    def tables(self) -> list[TextTable]:
        """All tables."""
        return [*self.summaries(), *chain.from_iterable(self.main_tables()), *self.further_tables()]

    def notes(self) -> list[str]:
        """What one must know to read the tables."""
        settings, found = self.settings, [self.caption(), data_note(self.rows), *self.about]
        if settings.figure != "test" or settings.choice == "last":  # the caption names another choice
            found.append(round_note(self.rows, settings.figure))
        done = sum(len(row.runs) + row.without for row in self.rows)
        found += [without_note(self.rows, self._what()), idle_note(self.rows, settings.figure)]
        expected = settings.expected_runs or sum(row.planned for row in self.rows)
        if done < expected:
            found.append(f"{done} of {expected} runs are finished; the table has these.")
        if any(column.name.startswith("nearest_neighbor") for column in self.columns):
            found.append(
                "Nearest-neighbor accuracies are of features without a head (each test sample takes the class of the "
                "nearest training samples): they stand in columns of their own and compare with each other only."
            )
        if settings.source:
            found.append(
                f"Published figures: {settings.source}. The difference is measured minus published, in points."
            )
        if any(column.name.endswith("worst_decile") for column in self.columns):
            found.append(FAIRNESS)
        if any(self.tests.values()):
            found.append(CAVEAT)
        found += [reference_note(settings.reference, self.tests), ranking_note(self.rows, settings.figure)]
        return [*filter(None, [*found, search_note(self.rows), settings.note])]

    def caption(self) -> str:
        """What the figures are."""
        if any(row.runs for row in self.rows) and not any(column.is_headline for column in self.columns):
            return f"No run has a {self._what()}: there is no column of it."
        choice = f", {self.settings.choice.replace('_', ' ')} round" if self.settings.figure == "test" else ""
        what = f"{FIGURES[self.settings.figure]}, mean over clients{choice}"
        return f"{what[0].upper()}{what[1:]}; ± is the standard deviation over seeds (n - 1)."

    def _what(self) -> str:
        """The headline, without its statistics."""
        of_round = f" of the {self.settings.choice.replace('_', ' ')} round" if self.settings.figure == "test" else ""
        return f"{FIGURES[self.settings.figure]}{of_round}"

    @cached_property
    def figure(self) -> Figure | None:
        """The curves."""
        return draw_curves(self.rows, self.settings)

    def write(self, folder: Path, names: Mapping[str, str]) -> list[Path]:
        """Write the report.

        Args:
            folder: Where its files go.
            names: Names of the files, by format.

        Returns:
            The files.
        """
        folder.mkdir(parents=True, exist_ok=True)
        makers: dict[str, Callable[[], str | bytes | None]] = {
            "md": self.markdown,
            "csv": self.csv,
            "tex": self.latex,
            "png": self.png,
            "html": self.html,
        }
        written = []
        for form, name in names.items():
            contents = {folder / name: makers[form]()}
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
        title, searched = self.settings.title, search_note(self.rows)
        parts = [latex_table([table], f"{title}: {table.title}.") for table in self.summaries()]
        for tables in self.main_tables(short=True):
            caption = " ".join(filter(None, [f"{_with_title(title, tables)}. {self.caption()}", searched]))
            parts.append(latex_table(tables, caption))
        tested = "p values are two-sided, with Holm's correction."
        parts += [latex_table([table], f"{title}: {table.title}. {tested}") for table in self.significance_tables()]
        parts += [latex_table([table], f"{title}: {table.title}.") for table in self.ranking_tables()]
        return "% needs \\usepackage{booktabs}\n" + "\n".join(parts)

    def png(self) -> bytes | None:
        """The curves as a picture."""
        figure, file = self.figure, io.BytesIO()
        if figure is None:
            return None
        figure.savefig(file, format="png", dpi=120)
        return file.getvalue()

    def html(self) -> str:
        """The page."""
        return html_page(self.settings.title, self.notes(), self.tables(), self.rows, self.figure)


def _with_title(title: str, tables: Sequence[TextTable]) -> str:
    """The title, with the setting where there is one alone: several stand above their rows."""
    return ": ".join(filter(None, [title, tables[0].title if len(tables) == 1 else ""]))


def _report(rows: Sequence[Row], settings: ReportSettings) -> Report:
    """The report of a study; rows with other data than the rest of their setting have tables of their own."""
    measured = measure(rows, settings)
    apart = apart_by_data(measured)
    separate = {row.setting for row in apart} != {row.setting for row in measured}
    return Report(tuple(apart), settings, (SEPARATE,) if separate else ())


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
    return _report(rows, settings).write(folder, STUDY_NAMES)


def live_table(rows: Sequence[Row], settings: ReportSettings, width: int | None = None) -> Table:
    """The table of what is finished so far; columns that a narrow terminal has no space for are left out.

    Args:
        rows: The rows.
        settings: What is shown.
        width: Characters in a line of the terminal; ``None`` to ask for it.
    """
    report = _report(rows, settings)
    columns = [c for c in report.columns if not c.is_detail and (c.is_headline or "nearest_neighbor" not in c.name)]
    published = any(row.published is not None for row in rows)
    console = Console(width=width)
    while True:
        shown = block_columns(columns, settings.figure, (), published)
        tables = [block_table(name, some, shown) for name, some in report.blocks.items()]
        table = terminal_table(tables, _with_title(settings.title, tables))
        warnings = [data_note(report.rows), without_note(report.rows, report._what())]
        said = "\n".join(filter(None, warnings))
        table.caption, table.caption_justify = Text(said) if said else None, "left"
        if fits(table, console) or not columns or columns[-1].is_headline:
            return table
        columns = columns[:-1]
