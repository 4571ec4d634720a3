"""``pfl study FILE`` and ``pfl reproduce NAME``: their options, and those of ``pfl fit`` that go to each run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import pfl_lightning
from pfl_lightning.cli.commands import WordParser, number
from pfl_lightning.cli.messages import OTHER_NAMES, nearest_flag, nearest_option
from pfl_lightning.errors import UsageError
from pfl_lightning.names import did_you_mean
from pfl_lightning.state.files import explain_full_disk
from pfl_lightning.study.conduct import Conductor
from pfl_lightning.study.reader import read_study

DESCRIPTION = """Run the methods, settings and seeds of a study file (docs/studies.md), several at once, and write
tables. The same command resumes after any interruption, and adds methods and seeds that were added to the file."""

OF_REPRODUCE = """Run a study that ships with the package, such as a table of a paper. Without a name: the list of them.
--data DIR is short for --data.init_args.root DIR."""

DEFAULT_SCALE = "reduced"

OF_A_RUN = (
    *("seed_everything", "engine", "personalize", "inspect"),
    *("model", "data", "trainer", "loop", "results", "checkpoint"),
)
"""First parts of the options that go to each run."""

OF_A_STUDY = ("--config", "--ckpt_path", "--resume", "--run_dir")
"""Options in whose place a study has its own."""


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
    _conduct(Path(arguments.study), arguments, ["study", *args])


def shipped_studies() -> dict[str, Path]:
    """The files of the studies that ship, by name."""
    folder = Path(pfl_lightning.__file__).parent / "studies"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}


def reproduce(args: list[str]) -> None:
    """``pfl reproduce NAME``: run a study that ships with the package.

    Args:
        args: The arguments after ``pfl reproduce``.
    """
    arguments = parse_arguments(study_parser("reproduce", "NAME", OF_REPRODUCE), args)
    studies = shipped_studies()
    if not arguments.study:
        table = Table("name", "table", "scales")
        for name, path in studies.items():
            found = read_study(path)
            table.add_row(name, found.title, ", ".join(found.scales))
        table.columns[0].no_wrap = True
        _console().print(table)
        print("pfl reproduce NAME [--scale SCALE] [--data DIR] runs one; --check prints its runs, --help the options")
        return
    name = arguments.study.removesuffix(".yaml")
    if name not in studies:
        meant = did_you_mean(name.lower().replace("_", "-"), list(studies))
        raise UsageError(f"no study {name!r} ships{meant} (`pfl reproduce` lists them; pfl study FILE runs a file)")
    if arguments.scale is None and DEFAULT_SCALE in read_study(studies[name]).scales:
        arguments.scale = DEFAULT_SCALE
    given = arguments.run_options
    arguments.run_options = [("data.init_args.root" if path == "data" else path, text) for path, text in given]
    _conduct(studies[name], arguments, ["reproduce", *args])


def _console() -> Console:
    """Where tables are printed: on a terminal of its width; lines of a file are as long as they are."""
    console = Console()
    return console if console.is_terminal else Console(width=160, soft_wrap=True)


def _conduct(path: Path, arguments: argparse.Namespace, argv: list[str]) -> None:
    """Do what a command line says with a study file."""
    found = read_study(path, arguments.scale or "")
    output = arguments.output or Path("runs", "studies", found.name + (f"-{found.scale}" if found.scale else ""))
    conductor = Conductor(found, output, arguments, argv, _console())
    with explain_full_disk(output):
        if arguments.report_only:
            conductor.report()
            conductor.print_left_over()
        elif arguments.check:
            conductor.check()
        else:
            sys.exit(conductor.run())


def study_parser(command: str, what: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command's own options.

    Args:
        command: Name of the command.
        what: Name of what it takes: a file, or a name.
        description: What the command does.
    """
    parser = WordParser(
        f"pfl {command}",
        usage=f"pfl {command} {what} [options] [--OPTION_OF_EVERY_RUN VALUE ...]",
        description=description,
        epilog="Options of pfl fit, such as --trainer.max_epochs 5 or --data.init_args.root DIR, go to every run.",
    )
    at_least_1 = number(int, lambda value: value >= 1, "a whole number of at least 1")
    at_least_0 = number(int, lambda value: value >= 0, "a whole number of at least 0")
    add = parser.add_argument
    add("study", nargs="?", default="", metavar=what)
    add("--scale", help="a scale of the study, such as smoke, reduced or paper")
    add("--output", type=Path, help="folder of the study (runs/studies/NAME[-SCALE])")
    add("--processes", type=at_least_1, help="runs at once (cores / threads; at most 4 on a GPU)")
    add("--threads", type=at_least_1, default=1, help="threads of each run (1)")
    add("--seeds", default="", metavar="0,1", help="run these seeds now; the others are missing")
    add("--methods", default="", metavar="A,B", help="run these methods, or rows, now")
    add("--settings", default="", metavar="A,B", help="run these settings now")
    add("--retry", type=at_least_0, default=0, help="tries of a run after it has failed (0)")
    add("--restart", action="store_true", help="move runs of changed options aside and run them again")
    add("--check", action="store_true", help="check every config and print the plan")
    add("--report-only", action="store_true", help="write the tables of what is done")
    return parser


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The command's own options; ``run_options`` has those of every run, as pairs of path and text.

    Raises:
        UsageError: An option is neither.
    """
    known = parser._option_string_actions
    own: list[str] = []
    others: list[tuple[str, str]] = []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        name, equals, text = word.partition("=")
        if not name.startswith("--") or name in known:
            own.append(word)
            if name in known and known[name].nargs != 0 and not equals and waiting:
                own.append(waiting.pop(0))
            continue
        _refuse_unknown(parser.prog, name, list(known))
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise UsageError(f"{name} has no value; give one, as in --trainer.max_epochs 5")
            text = waiting.pop(0)
        others.append((name.removeprefix("--"), text))
    return parser.parse_args(own, argparse.Namespace(run_options=others))


def _refuse_unknown(command: str, name: str, known: Sequence[str]) -> None:
    if name.removeprefix("--").partition(".")[0].removesuffix("+") in OF_A_RUN:
        return
    elsewhere = [option for option in OTHER_NAMES.values() if option.partition(".")[0] in OF_A_RUN]
    near = nearest_flag(name, known).removeprefix("--") or nearest_option(name, [*OF_A_RUN, *elsewhere])
    hint = f"options of the study are in {command} --help, those of its runs in pfl fit --help"
    if name in OF_A_STUDY:
        hint = "give configs as base of the study's file, its folder by --output; its runs resume by themselves"
    elif near:
        hint = f"did you mean --{near}?"
    raise UsageError(f"unknown option {name}: {hint}")
