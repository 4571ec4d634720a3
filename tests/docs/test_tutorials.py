"""The tutorials run, and print what their pages show.

Numbers may differ between machines and are not compared. To write the outputs again: PFL_WRITE_OUTPUTS=1 pytest FILE.

The tutorials take over 10 s: they are whole runs, as a reader would start them.
"""

import contextlib
import io
import os
import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
SCRIPTS = sorted(FOLDER.glob("*.py"))
NEEDS = {"adapters": ("peft", "transformers")}
"""Packages that a tutorial needs beside this one."""


def masked(text):
    """Lines without their numbers, and without the spaces and rules that depend on their widths."""
    lines = re.sub(r"[ ─━]+", " ", re.sub(r"\d+(\.\d+)?", "#", text)).splitlines()
    return [line.strip() for line in lines if line.strip()]


def test_tutorials_are_there():
    assert len(SCRIPTS) >= 5
    for script in SCRIPTS:
        assert f"literalinclude}} {script.name}" in script.with_suffix(".md").read_text()
        assert script.stem in (FOLDER / "index.md").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_tutorial(script, tmp_path, monkeypatch):
    """Each trains small federations: up to 15 s on one core."""
    for package in NEEDS.get(script.stem, ()):
        pytest.importorskip(package, reason=f"the tutorial {script.stem} needs {package}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(script))
    shown = script.with_suffix(".txt")
    if os.environ.get("PFL_WRITE_OUTPUTS"):
        shown.write_text("\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines()) + "\n")
    assert masked(printed.getvalue()) == masked(shown.read_text())


def test_every_cell_is_shown():
    """A part of a script that no page shows would be read by nobody."""
    for script in SCRIPTS:
        page = script.with_suffix(".md").read_text()
        starts = re.findall(r':start-after: "# %% (.*)"', page)
        cells = re.findall(r"^# %% (.*)$", script.read_text(), flags=re.MULTILINE)
        assert len(starts) == len(cells), script.name
        for start, cell in zip(starts, cells, strict=True):
            assert cell.startswith(start), (script.name, cell)
        # literalinclude takes the first line that contains the marker
        assert all(sum(start in cell for cell in cells) == 1 for start in starts), script.name
