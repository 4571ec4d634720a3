"""Words of ``pfl study`` and ``pfl reproduce``: options of the study, and options that go to each run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pfl_lightning.cli.commands import WordParser, whole_number
from pfl_lightning.cli.options.names import OTHER_NAMES, nearest_flag, nearest_option
from pfl_lightning.errors import UsageError

__all__ = ["StudyArguments", "parse_arguments", "study_parser"]

OF_A_RUN = (
    *("config", "seed_everything", "engine", "personalize", "inspect"),
    *("model", "data", "trainer", "loop", "results", "checkpoint"),
)
"""First parts of the options that go to each run."""

INSTEAD = {
    "--ckpt_path": "runs go on by themselves",
    "--resume": "runs go on by themselves",
    "--run_dir": "the folder of a study is --output",
}
"""What a study has in place of options of a run."""


@dataclass(frozen=True)
class StudyArguments:
    """What the command line says.

    Attributes:
        study: Study file, or name of a study that ships; "" for none.
        scale: Name of a scale; ``None`` for the command's default.
        output: Folder of the study; ``None`` for the default.
        processes: Runs at once; ``None`` for the default.
        threads: Threads of each run.
        retry: How often a run that failed is tried again.
        restart: Whether runs of another config are moved aside.
        check: Whether only the plan is printed.
        report_only: Whether only the tables are written.
        ray: Address of a Ray cluster; "" for this machine.
        gpus: GPUs of each run on a Ray cluster.
        seeds: Seeds that are run now, divided by commas; "" for all.
        methods: Methods or rows that are run now; "" for all.
        settings: Settings that are run now; "" for all.
        run_options: Options of every run, as pairs of path and text.
    """

    study: str
    scale: str | None
    output: Path | None
    processes: int | None
    threads: int
    retry: int
    restart: bool
    check: bool
    report_only: bool
    ray: str
    gpus: float
    seeds: str
    methods: str
    settings: str
    run_options: tuple[tuple[str, str], ...]


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
    parser.add_argument("study", nargs="?", default="", metavar=what)
    parser.add_argument("--scale", help="a scale of the study, such as smoke, reduced or paper")
    parser.add_argument("--output", type=Path, help="folder of the study (runs/studies/NAME[-SCALE])")
    parser.add_argument(
        "--processes", type=whole_number(at_least=1), help="runs at once (cores / threads; at most 4 on a GPU)"
    )
    parser.add_argument("--threads", type=whole_number(at_least=1), default=1, help="threads of each run (1)")
    parser.add_argument("--seeds", default="", metavar="0,1", help="run these seeds now; the others are missing")
    parser.add_argument("--methods", default="", metavar="A,B", help="run these methods, or rows, now")
    parser.add_argument("--settings", default="", metavar="A,B", help="run these settings now")
    parser.add_argument(
        "--retry", type=whole_number(at_least=0), default=0, help="tries of a run after it has failed (0)"
    )
    parser.add_argument("--restart", action="store_true", help="move runs of changed options aside and run them again")
    parser.add_argument("--check", action="store_true", help="check every config and print the plan")
    parser.add_argument("--report-only", action="store_true", help="write the tables of what is done")
    parser.add_argument("--ray", default="", metavar="ADDRESS", help="run on a Ray cluster: auto, local or an address")
    parser.add_argument("--gpus-per-run", type=float, default=0.0, dest="gpus", help="of a Ray cluster (0)")
    return parser


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> StudyArguments:
    """Parse the words of a command; options that are not the command's go to every run.

    Raises:
        UsageError: An option is neither, or was one of earlier versions.
    """
    if gone := sorted({"--estimate", "--no-estimate"} & set(argv)):
        raise UsageError(
            f"{gone[0]}: no rounds are timed before a study starts; the time left is shown from its first rounds on. "
            "Leave the option out"
        )
    own, others = _divide(parser, argv)
    return StudyArguments(**vars(parser.parse_args(own)), run_options=tuple(others))


def _divide(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The words that are the command's own, and options of every run as pairs of path and text."""
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
    return own, others


def _refuse_unknown(command: str, name: str, known: Sequence[str]) -> None:
    first = name.removeprefix("--").partition(".")[0].removesuffix("+")
    if first in OF_A_RUN:
        return
    elsewhere = [option for option in OTHER_NAMES.values() if option.partition(".")[0] in OF_A_RUN]
    near = nearest_flag(name, known).removeprefix("--") or nearest_option(name, [*OF_A_RUN, *elsewhere])
    hint = f"did you mean --{near}?" if near else ""
    where = f"options of the study are in {command} --help, those of its runs in pfl fit --help"
    raise UsageError(f"unknown option {name}: {INSTEAD.get(name) or hint or where}")
