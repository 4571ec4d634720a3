"""``pfl study FILE``: run what is not done of a study, and write its tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from pfl_lightning.errors import UsageError
from pfl_lightning.study.arguments import StudyArguments, parse_arguments, study_parser
from pfl_lightning.study.conduct import Conductor
from pfl_lightning.study.definition.reader import read_study
from pfl_lightning.study.unwritable import explain_unwritable

__all__ = ["conduct", "study"]

DESCRIPTION = """Run the methods, settings and seeds of a study file (docs/studies.md), several at once, and write
tables. The same command goes on after any interruption, and adds methods and seeds that were added to the file."""


def study(args: list[str]) -> None:
    """``pfl study FILE``: run what is not done of a study, and write its tables.

    Args:
        args: The words behind ``pfl study``.
    """
    parser = study_parser("study", "FILE", DESCRIPTION)
    if not args:
        parser.print_help()
        return
    arguments = parse_arguments(parser, args)
    if not arguments.study:
        raise UsageError("pfl study needs a study file, as in pfl study my_study.yaml")
    conduct(Path(arguments.study), replace(arguments, scale=arguments.scale or ""), ["study", *args])


def conduct(path: Path, arguments: StudyArguments, words: Sequence[str]) -> None:
    """Do what a command line says with a study file.

    Args:
        path: The study file.
        arguments: What the command line says.
        words: The command, to say how to go on.
    """
    found = read_study(path, arguments.scale or "")
    name = found.name + (f"-{found.scale}" if found.scale else "")
    output = arguments.output or Path("runs", "studies", name)
    conductor = Conductor(found, output, arguments, list(words), _console())
    with explain_unwritable(output):
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
