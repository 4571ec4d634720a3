"""Tables as Markdown, LaTeX and CSV, and on a terminal."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from pfl_lightning.report.rows import MeasuredRow, ReportSettings
from pfl_lightning.report.significance import PairedTests
from pfl_lightning.report.tables import Cell, Column, TextTable
from pfl_lightning.runs.results import csv_text

_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": "$<$",
    ">": "$>$",
    "|": r"\textbar{}",
    "\n": " ",
}
HEADING_WIDTH = 16
"""Characters in a line of a heading on a terminal."""

TESTED = {
    **{"reference": "reference", "difference": "difference", "pairs_of_seeds": "seeds", "p_seeds": "p_seeds"},
    **{"pairs_of_clients": "clients", "p_clients": "p_clients"},
}
"""Columns of the paired tests, and the attributes of these."""


def markdown_table(table: TextTable) -> str:
    """The table in Markdown, below its title; the best figures are bold."""
    rows = [[_markdown_text(heading) for heading in table.headings]]
    for line in table.lines:
        rows.append([f"**{_markdown_text(cell.text)}**" if cell.best else _markdown_text(cell.text) for cell in line])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * (len(table.headings) - 1))
    title = [f"**{_markdown_text(table.title)}**", ""] if table.title else []
    return "\n".join([*title, *lines, ""])


def _markdown_text(text: str) -> str:
    """Without signs that end a cell, make emphasis or open a tag."""
    text = re.sub(r"([\\|*_`\[\]])", r"\\\1", " ".join(text.split()))
    return re.sub(r"<(?=[A-Za-z/!])", r"\\<", text)


def escape_latex(text: str) -> str:
    r"""A text in which LaTeX's signs stand for themselves.

    Example:
        >>> escape_latex("lr_scheduler, 50 % ± 1")
        'lr\\_scheduler, 50 \\% $\\pm$ 1'
    """
    return "".join(_LATEX.get(sign, sign) for sign in text)


def latex_table(blocks: Sequence[TextTable], caption: str) -> str:
    """Tables of the same columns as one of booktabs, a block for each; the best figures are bold.

    Args:
        blocks: The tables; their titles head the blocks.
        caption: Caption of the whole.
    """
    headings = blocks[0].headings
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{escape_latex(caption)}}}"]
    lines += [
        rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}",
        r"\toprule",
        _latex_line(map(escape_latex, headings)),
    ]
    for block in blocks:
        lines.append(r"\midrule")
        if block.title and len(blocks) > 1:
            lines.append(rf"\multicolumn{{{len(headings)}}}{{l}}{{\textit{{{escape_latex(block.title)}}}}} \\")
        lines += [_latex_line(map(_latex_cell, line)) for line in block.lines]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _latex_line(cells: object) -> str:
    line = " & ".join(cells) + r" \\"  # type: ignore[arg-type]
    # Behind the end of the line above, these would be a length, or a star that forbids a page break.
    return f"{{{line[0]}}}{line[1:]}" if line.startswith(("[", "*")) else line


def _latex_cell(cell: Cell) -> str:
    text = escape_latex(cell.text)
    if re.fullmatch(r"[-+\d.,± ]+", cell.text):  # a number
        text = re.sub(r"-(?=\d)", "$-$", text)
    return rf"\textbf{{{text}}}" if cell.best else text


def terminal_table(blocks: Sequence[TextTable], title: str) -> Table:
    """Tables of the same columns for a terminal, a section for each.

    Args:
        blocks: The tables; their titles head the sections where there are several.
        title: Title of the whole.
    """
    table = Table(title=Text(title))
    for index, heading in enumerate(blocks[0].headings if blocks else ()):
        lines = textwrap.fill(heading, HEADING_WIDTH, break_long_words=False) if index else heading
        justify: JustifyMethod = "right" if index else "left"
        table.add_column(Text(lines), justify=justify, overflow="fold", no_wrap=index > 0)
    for block in blocks:
        if len(blocks) > 1:
            table.add_row(Text(block.title, style="bold italic"), *[""] * (len(block.headings) - 1))
        for line in block.lines:
            table.add_row(*(Text(cell.text, style="bold" if cell.best else "") for cell in line))
        table.add_section()
    return table


def fitting_tables(table: TextTable, title: str, console: Console) -> list[Table]:
    """A table as it can be printed: as it is, or with a column for each line, as many side by side as fit.

    Args:
        table: The table.
        title: What it is called.
        console: Where it is printed.
    """
    whole = terminal_table([table], title)
    if _fits(whole, console):
        return [whole]
    parts: list[tuple[tuple[Cell, ...], ...]] = []
    for line in table.lines:
        if parts and _fits(terminal_table([_turned(table.headings, (*parts[-1], line))], title), console):
            parts[-1] = (*parts[-1], line)
        else:
            parts.append((line,))
    return [terminal_table([_turned(table.headings, lines)], title) for lines in parts]


def _fits(table: Table, console: Console) -> bool:
    """Whether a table can be printed as it is."""
    wide = console.options.update(max_width=10_000)
    return Measurement.get(console, wide, table).maximum <= console.width


def _turned(headings: Sequence[str], lines: Sequence[tuple[Cell, ...]]) -> TextTable:
    """A table with a column for each of its lines."""
    names, *rows = zip(map(Cell, headings), *lines, strict=True)
    return TextTable("", tuple(cell.text for cell in names), tuple(rows))


def rows_csv(
    rows: Sequence[MeasuredRow],
    columns: Sequence[Column],
    settings: ReportSettings,
    tests: dict[tuple[str, str], PairedTests],
) -> str:
    """A line for each row, with mean and standard deviation over seeds of each figure in separate columns.

    Args:
        rows: The rows.
        columns: The figures.
        settings: The report's settings.
        tests: Paired tests by setting and label.
    """
    lines = []
    for row in rows:
        first = row.runs[0] if row.runs else None
        line: dict[str, Any] = {"setting": row.setting, "run": row.label, "method": first.method if first else ""}
        line |= {"seeds": len(row.runs), "planned_seeds": row.planned, "search_trials": row.trials}
        line |= {"rounds": first.rounds if first else None, "clients": first.num_clients if first else None}
        line |= {"score": row.score(settings.figure), "model": first.evaluation(settings.figure).model if first else ""}
        over_seeds = {column.name: row.over_seeds(column.figure) for column in columns}
        for name, found in over_seeds.items():
            line |= {name: found.mean, f"{name}_std_over_seeds": found.std}
        line |= {f"{name}_seeds": found.count for name, found in over_seeds.items() if "to_target" in name}
        test = tests.get((row.setting, row.label))
        line["published_percent"] = row.published
        lines.append(line | {name: getattr(test, attribute, None) for name, attribute in TESTED.items()})
    return _csv_text(lines)


def runs_csv(rows: Sequence[MeasuredRow], columns: Sequence[Column]) -> str:
    """A line for each run: its seed, fingerprints and figures.

    Args:
        rows: The rows.
        columns: The figures.
    """
    lines = []
    for row in rows:
        for run in row.runs:
            line: dict[str, Any] = {"setting": row.setting, "run": row.label, "folder": run.path, "method": run.method}
            line |= {"seed": run.seed, "rounds": run.rounds, "clients": run.num_clients}
            line |= {"data": run.data.name, "data_fingerprint": run.data.fingerprint}
            line |= {"partition": run.partition.name, "partition_fingerprint": run.partition.fingerprint}
            lines.append(line | {"score": run.test.score} | {column.name: column.figure(run) for column in columns})
    return _csv_text(lines)


def _csv_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Lines by heading; what is not known, or not finite, is empty."""
    rows = ([math.nan if value in (math.inf, -math.inf) else value for value in line.values()] for line in lines)
    return csv_text([lines[0] if lines else (), *rows], end="\n")
