"""No folder but that of the methods is large; maps in docstrings name all that lies in a package, and nothing else."""

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


FOLDERS = sorted(
    folder
    for top in ("pfl_lightning", "callbacks", "datamodules")
    for folder in (ROOT / top, *(ROOT / top).rglob("*/"))
    if (folder / "__init__.py").exists() and not folder.is_symlink() and folder.name != "methods"
)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_folders_are_small(folder):
    modules = [path.stem for path in folder.glob("*.py") if path.name != "__init__.py"]
    most = 20 if folder.name == "pfl_lightning" else 16  # the ground floor, which is open to all
    assert len(modules) <= most, "divide it: a stranger should find a thing by its name"


def test_every_folder_of_modules_is_a_package():
    """A checkout would lose the file of one whose name .gitignore has, such as ``runs``."""
    modules = (path for top in ("pfl_lightning", "callbacks", "datamodules") for path in (ROOT / top).rglob("*.py"))
    assert not {path.parent for path in modules if not (path.parent / "__init__.py").is_file()}


def test_large_packages_have_maps():
    large = {"pfl_lightning", "datamodules/adapters", "pfl_lightning/report", "pfl_lightning/state"}
    assert large <= {str(folder.relative_to(ROOT)) for folder in MAPS}


@pytest.mark.parametrize("folder", MAPS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_map_names_every_module(folder):
    first_cells = "\n".join(line.partition("  ")[0] for line in MAPS[folder].splitlines() if line.startswith("``"))
    named = set(re.findall(r"``(\w+)``", first_cells))
    held = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert named == {name for name in held if not name.startswith("_")}
