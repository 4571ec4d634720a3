"""Packages whose docstring is a map name all that lies in them, and nothing else."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAPS = {
    folder.parent: docstring
    for folder in sorted(
        p for top in ("pfl_lightning", "callbacks", "datamodules") for p in (ROOT / top).rglob("__init__.py")
    )
    if "\n====" in (docstring := ast.get_docstring(ast.parse(folder.read_text())) or "")
}


def test_large_packages_have_maps():
    large = {"pfl_lightning", "datamodules/adapters", "pfl_lightning/report", "pfl_lightning/state"}
    assert large <= {str(folder.relative_to(ROOT)) for folder in MAPS}


@pytest.mark.parametrize("folder", MAPS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_map_names_every_module(folder):
    first_cells = "\n".join(line.partition("  ")[0] for line in MAPS[folder].splitlines() if line.startswith("``"))
    named = set(re.findall(r"``(\w+)``", first_cells))
    held = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert named == {name for name in held if not name.startswith("_")}
