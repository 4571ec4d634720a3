"""Tables on narrow terminals: nothing is cut, and every figure stands beside the name of its row."""

import io
import re

import pytest
from rich.console import Console

from pfl_lightning.report.formats import NAME_WIDTH, fitting_tables
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
    """Headings and lines of a printed table; what is folded is put together."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in text.splitlines() if line[0] in "│┃"]
    above = sum(line.startswith("┃") for line in text.splitlines())
    headings = [" ".join(filter(None, column)) for column in zip(*rows[:above], strict=True)]
    lines = []
    for name, *figures in rows[above:]:
        if any(figures):
            lines.append([name, *figures])
        else:
            lines[-1][0] += f" {name}"
    return headings, lines


@pytest.mark.parametrize("rows", [5, 12])
@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_has_parts_with_every_name_and_figure(rows, width):
    given = table(rows)
    texts = printed(given, width)
    assert len(texts) > 1
    seen = []
    for number, text in enumerate(texts, start=1):
        assert f"Comparison, part {number} of {len(texts)}" in text
        assert max(map(len, text.splitlines())) <= width
        headings, lines = cells_of(text)
        assert headings[0] == "run"
        assert [line[0] for line in lines] == [line[0].text for line in given.lines]
        first = len(seen) + 1
        seen += headings[1:]
        for line, whole in zip(lines, given.lines, strict=True):
            assert line[1:] == [cell.text for cell in whole[first : first + len(line) - 1]]
    assert seen == list(HEADINGS[1:])


def test_a_wide_terminal_has_one_table():
    (text,) = printed(table(12), 200)
    assert cells_of(text)[0] == list(HEADINGS)
    assert "part" not in text


def test_few_rows_are_columns_where_they_fit():
    (text,) = printed(table(2, "FedAvg {}"), 60)
    headings, lines = cells_of(text)
    assert headings == ["run", "FedAvg 0", "FedAvg 1"]
    assert [line[0] for line in lines] == list(HEADINGS[1:])


def test_long_names_are_folded_between_words():
    texts = printed(table(5), 80)
    first = [line for line in texts[0].splitlines() if line.startswith("│")]
    assert first[0].startswith("│ FedAvg, fine_tune=all,")
    assert len("FedAvg, fine_tune=all,") <= NAME_WIDTH
