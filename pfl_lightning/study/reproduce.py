"""``pfl reproduce NAME``: studies that ship with the package."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

import pfl_lightning
from pfl_lightning.cli.options.nearest import NEAR
from pfl_lightning.errors import UsageError
from pfl_lightning.study.arguments import parse_arguments, study_parser
from pfl_lightning.study.command import conduct
from pfl_lightning.study.definition.reader import read_study
from pfl_lightning.text import nearest

__all__ = ["reproduce", "shipped_studies"]

DESCRIPTION = """Run a study that ships with the package, such as a table of a paper. Without a name: the list of them.
Before it starts it says how long it will take. --data DIR is short for --data.init_args.root DIR."""

DEFAULT_SCALE = "reduced"
ON_DIGITS = "smoke"
"""The scale at which every study has the bundled digits in place of its data."""


def shipped_studies() -> dict[str, Path]:
    """The files of the studies that ship, by name."""
    folder = Path(pfl_lightning.__file__).parent / "studies"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}


def reproduce(args: list[str]) -> None:
    """``pfl reproduce NAME``: run a study that ships with the package.

    Args:
        args: The words behind ``pfl reproduce``.
    """
    parser = study_parser("reproduce", "NAME", DESCRIPTION)
    arguments = parse_arguments(parser, args)
    studies = shipped_studies()
    if not arguments.study:
        Console().print(_table(studies))
        print("pfl reproduce NAME [--scale SCALE] [--data DIR] runs one; --check prints its runs, --help the options")
        return
    name = arguments.study.removesuffix(".yaml")
    if name not in studies:
        meant = _meant(name, list(studies))
        own = f"; a study file of your own is run by pfl study {shlex.quote(arguments.study)}"
        own = own if Path(arguments.study).is_file() else ""
        raise UsageError(f"no study {name!r} ships{meant}{own} (`pfl reproduce` lists them)")
    scale = arguments.scale
    if scale is None:
        scale = DEFAULT_SCALE if DEFAULT_SCALE in read_study(studies[name]).scales else ""
    words = tuple(("data.init_args.root" if path == "data" else path, text) for path, text in arguments.words)
    if scale == ON_DIGITS and any(path == "data" for path, _ in arguments.words):
        print(f"--data is not used: the scale {ON_DIGITS} takes the bundled digits")
        words = tuple((path, text) for path, text in arguments.words if path != "data")
    conduct(studies[name], replace(arguments, words=words, scale=scale), ["reproduce", *args])


def _meant(name: str, studies: Sequence[str]) -> str:
    """The study that is like an unknown name, or all that have it in their names."""
    name = name.lower().replace("_", "-")
    whole = r"(?!\d)" if name[-1:].isdigit() else ""  # table1 is not table10
    having = [study for study in studies if re.search(rf"(?<![a-z\d]){re.escape(name)}{whole}", study)]
    if len(having) > 1:
        return f"; these have it in their names: {', '.join(having)}"
    near = having[0] if having else nearest(name, studies, NEAR)
    return f"; did you mean {near}?" if near else ""


def _table(studies: dict[str, Path]) -> Table:
    table = Table()
    for column in ("name", "table", "scales"):
        table.add_column(column, no_wrap=column == "name")
    for name, path in studies.items():
        study = read_study(path)
        table.add_row(name, study.title, ", ".join(study.scales))
    return table
