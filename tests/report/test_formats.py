"""Tables on narrow terminals: nothing is cut, and every figure stands beside the name of its row."""

import io
import re

import pytest
from rich.console import Console

from pfl_lightning.report.formats import fitting_tables
from pfl_lightning.report.tables import Cell, TextTable

HEADINGS = ("run", "seeds", "model", "test accuracy, %", "std over clients, %", "worst decile, %", "MB up", "MB down")


def table(rows, name="FedAvg, fine_tune=all, lr=0.0{}"):
    """A table of some rows, whose figures are all different."""
    lines = []
    for row in range(rows):
        figures = [f"{row},{column}23.45" for column in range(len(HEADINGS) - 3)]
        lines.append(tuple(map(Cell, (name.format(row), "3", "aggregated", *figures))))
    return TextTable("", HEADINGS, tuple(lines))


def printed(given, width):
    """The text of each table that is printed."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    found = []
    for shown in fitting_tables(given, "Comparison", console):
        console.print(shown)
        found.append(console.file.getvalue())
        console.file = io.StringIO()
    return found


def cells_of(text):
    """Headings and lines of a printed table; headings that are folded are put together."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in text.splitlines() if line[0] in "│┃"]
    above = sum(line.startswith("┃") for line in text.splitlines())
    headings = [" ".join(filter(None, column)) for column in zip(*rows[:above], strict=True)]
    return headings, rows[above:]


@pytest.mark.parametrize("rows", [2, 5, 12])
@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_has_a_column_for_each_row(rows, width):
    given = table(rows)
    seen = []
    for text in printed(given, width):
        assert "Comparison" in text
        assert max(map(len, text.splitlines())) <= width
        headings, lines = cells_of(text)
        assert [line[0] for line in lines] == list(HEADINGS[1:])
        first = len(seen)
        seen += headings[1:]
        for number, line in enumerate(lines, start=1):
            assert line[1:] == [row[number].text for row in given.lines[first : first + len(line) - 1]]
    assert seen == [line[0].text for line in given.lines]


def test_a_wide_terminal_has_one_table():
    (text,) = printed(table(12), 200)
    assert cells_of(text)[0] == list(HEADINGS)
