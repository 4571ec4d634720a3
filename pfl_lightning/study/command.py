"""``pfl study FILE`` and ``pfl reproduce NAME``: run what is not done of a study, and write its tables."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

import pfl_lightning
from pfl_lightning.cli.options.names import NEAR
from pfl_lightning.errors import UsageError
from pfl_lightning.names import nearest
from pfl_lightning.state.files import explain_folder, explain_full_disk
from pfl_lightning.study.arguments import StudyArguments, parse_arguments, study_parser
from pfl_lightning.study.conduct import Conductor
from pfl_lightning.study.definition.reader import read_study

__all__ = ["conduct", "reproduce", "shipped_studies", "study"]

DESCRIPTION = """Run the methods, settings and seeds of a study file (docs/studies.md), several at once, and write
tables. The same command goes on after any interruption, and adds methods and seeds that were added to the file."""

OF_REPRODUCE = """Run a study that ships with the package, such as a table of a paper. Without a name: the list of them.
--data DIR is short for --data.init_args.root DIR."""

DEFAULT_SCALE = "reduced"
ON_DIGITS = "smoke"
"""The scale at which every study has the bundled digits in place of its data."""


def study(args: list[str]) -> None:
    """``pfl study FILE``: run what is not done of a study, and write its tables.

    Args:
        args: The arguments after ``pfl study``.
    """
    parser = study_parser("study", "FILE", DESCRIPTION)
    if not args:
        parser.print_help()
        return
    arguments = parse_arguments(parser, args)
    if not arguments.study:
        raise UsageError("pfl study needs a study file, as in pfl study my_study.yaml")
    conduct(Path(arguments.study), replace(arguments, scale=arguments.scale or ""), ["study", *args])


def shipped_studies() -> dict[str, Path]:
    """The files of the studies that ship, by name."""
    folder = Path(pfl_lightning.__file__).parent / "studies"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}


def reproduce(args: list[str]) -> None:
    """``pfl reproduce NAME``: run a study that ships with the package.

    Args:
        args: The arguments after ``pfl reproduce``.
    """
    parser = study_parser("reproduce", "NAME", OF_REPRODUCE)
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
    options = tuple(("data.init_args.root" if path == "data" else path, text) for path, text in arguments.run_options)
    if scale == ON_DIGITS and any(path == "data" for path, _ in arguments.run_options):
        print(f"--data is not used: the scale {ON_DIGITS} takes the bundled digits")
        options = tuple((path, text) for path, text in arguments.run_options if path != "data")
    conduct(studies[name], replace(arguments, run_options=options, scale=scale), ["reproduce", *args])


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


def conduct(path: Path, arguments: StudyArguments, argv: Sequence[str]) -> None:
    """Do what a command line says with a study file.

    Args:
        path: The study file.
        arguments: What the command line says.
        argv: The command, to say how to go on.
    """
    found = read_study(path, arguments.scale or "")
    name = found.name + (f"-{found.scale}" if found.scale else "")
    output = arguments.output or Path("runs", "studies", name)
    conductor = Conductor(found, output, arguments, list(argv), _console())
    with explain_full_disk(output), explain_folder(output, "--output"):
        if arguments.report_only:
            conductor.report_only()
        elif arguments.check:
            conductor.check()
        else:
            sys.exit(conductor.run())


def _console() -> Console:
    """The terminal; lines of a file are as long as they are."""
    console = Console()
    return console if console.is_terminal else Console(width=160, soft_wrap=True)
