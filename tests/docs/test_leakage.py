"""The table of what updates tell: every field of every method is declared, and the page of each method has it."""

from dataclasses import fields
from pathlib import Path

import pytest
from leakage import COLUMNS, SHOWS, described_server, leakage_section, leakage_table

from pfl_lightning import methods
from pfl_lightning.messages import TELLS

METHODS = (*methods.METHODS, *methods.ADAPTER_METHODS)
PAGES = Path(__file__).parents[2] / "docs" / "methods"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_every_field_of_an_update_says_what_it_tells(method):
    update = type(described_server(method)).update_class
    for declared in fields(update):
        if "schema" in declared.metadata:
            assert declared.metadata["schema"].tells in TELLS, f"{update.__name__}.{declared.name}"
    names = {row[0].strip("`") for row in leakage_table(method)}
    assert names <= {declared.name for declared in fields(update)}
    assert all(row[1] for row in leakage_table(method)), "a field has no sentence"


def test_every_kind_of_content_has_its_cells():
    assert {*SHOWS} == {*TELLS, "encoder weights"}
    assert {len(cells) for cells in SHOWS.values()} == {len(COLUMNS)}


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_the_page_of_a_method_has_the_table(page):
    section = leakage_section(page.read_text())
    if page.stem == "index":
        assert section == ""
        return
    assert "## What updates tell" in section
    if page.stem == "local_only":
        assert "Clients send nothing" in section
    if page.stem == "fedproto":
        lines = {line.split(" | ")[0]: line for line in section.splitlines() if line.startswith("| `")}
        assert {*lines} == {"| `classes`", "| `means`", "| `counts`"}
        assert "| yes | yes |" in lines["| `counts`"]
        assert "of a class with one sample" in lines["| `means`"]
