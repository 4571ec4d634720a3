"""The subcommands of ``pfl``, each with a line of help, and the parser of those that have no Trainer."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pfl_lightning.cli.messages import nearest_flag
from pfl_lightning.errors import UsageError

TRAINER_COMMANDS = {
    "fit": "train a federation and report its test accuracies",
    "validate": "evaluate a checkpoint on the clients' validation parts",
    "test": "evaluate a checkpoint on the clients' test parts",
    "personalize": "let every client adapt a trained model to its data, and evaluate it",
    "export": "write every client's model: state_dict, torch.export or ONNX",
    "predict": "predict with a client's model, or from an exported file alone",
    "partition": "show which samples and architecture each client has, without training",
}
"""Subcommands of the Trainer, which take the options of a run, with their help."""


OTHER_COMMANDS = {
    "methods": ("pfl_lightning.cli.methods:print_methods", "list methods, objectives and encoders"),
    "compare": ("pfl_lightning.cli.compare:compare", "compare finished runs: a table and learning curves"),
    "study": ("pfl_lightning.study.command:study", "run a study file: methods, settings, seeds; one table"),
    "reproduce": ("pfl_lightning.study.command:reproduce", "run a study that ships, such as a paper's table"),
}
"""Subcommands that need no Trainer: ``module:function``, which takes the arguments that follow, and their help."""

HELP_TEXT = Path(__file__).with_name("short_help.txt")
"""Help on subcommands that have a Trainer: a part follows those that it is about, in brackets, or ``[all]``."""


def short_help(command: str) -> str:
    """Help on a subcommand that has a Trainer, on two screens of 80 columns and 40 lines.

    Args:
        command: Its name.
    """
    _, *parts = re.split(r"^\[([\w ]+)\]\n", HELP_TEXT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = "".join(text for of, text in zip(parts[::2], parts[1::2], strict=True) if {"all", command} & {*of.split()})
    return found.format(command=command, does=textwrap.fill(f"pfl {command}: {TRAINER_COMMANDS[command]}.", 80))


class WordParser(argparse.ArgumentParser):
    """``argparse``'s parser, whose errors are told as all others of ``pfl``, without the list of all options.

    Options have no abbreviations: an unknown one is refused, with the one that was probably meant.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            UsageError: Says what is wrong.
        """
        unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
        near = nearest_flag(unknown[1], self._option_string_actions) if unknown else ""
        meant = f": did you mean {near}?" if near else ""
        raise UsageError(f"{message}{meant} ({self.prog} --help lists the options)")


def number(kind: Callable[[str], float], fits: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    """A kind of option: numbers within limits.

    Args:
        kind: ``int`` or ``float``.
        fits: Whether a number is within them.
        expected: What the option must be, for the error.
    """

    def read(text: str) -> float:
        with suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {expected}, got {text}")

    return read
