"""The subcommands of ``pfl``, each with a line of help, and the parser of those that have no Trainer."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pfl_lightning.cli.messages import nearest_flag
from pfl_lightning.errors import UsageError

__all__ = ["OTHER_COMMANDS", "TRAINER_COMMANDS", "Command", "WordParser", "share", "short_help", "whole_number"]

TRAINER_COMMANDS = {
    "fit": "train a federation and report its test accuracies",
    "validate": "evaluate a checkpoint on the clients' validation parts",
    "test": "evaluate a checkpoint on the clients' test parts",
    "personalize": "let every client adapt a trained model to its data, and evaluate it",
    "export": "write every client's model as a plain state_dict",
    "partition": "show which samples each client holds, without training",
}
"""Subcommands of the Trainer, which take the options of a run, with their help."""


@dataclass(frozen=True)
class Command:
    """A subcommand without a Trainer.

    Attributes:
        function: ``module:function``; it is called with the list of arguments that follow the subcommand.
        help: One line for ``pfl --help``.
    """

    function: str
    help: str


OTHER_COMMANDS = {
    "methods": Command("pfl_lightning.cli.methods:print_methods", "list methods, objectives and encoders"),
    "compare": Command("pfl_lightning.cli.compare:compare", "compare finished runs: a table and learning curves"),
    "tensorboard": Command("pfl_lightning.cli.compare:tensorboard", "show runs in TensorBoard"),
    "study": Command("pfl_lightning.study.command:study", "run a study file: methods, settings, seeds; one table"),
    "reproduce": Command("pfl_lightning.study.command:reproduce", "run a study that ships, such as a paper's table"),
}
"""Subcommands that need no Trainer."""

HELP_TEXT = Path(__file__).with_name("short_help.txt")
"""Help on subcommands that have a Trainer: a part follows those that it is about, in brackets, or ``[all]``."""


def short_help(command: str) -> str:
    """Help on a subcommand that has a Trainer, on two screens of 80 columns and 40 lines.

    Args:
        command: Its name.
    """
    _, *parts = re.split(r"^\[([\w ]+)\]\n", HELP_TEXT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    told = "".join(text for of, text in zip(parts[::2], parts[1::2], strict=True) if {"all", command} & {*of.split()})
    return told.format(command=command, does=textwrap.fill(f"pfl {command}: {TRAINER_COMMANDS[command]}.", 80))


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


def whole_number(at_least: int) -> Callable[[str], int]:
    """A kind of option: whole numbers from a smallest one.

    Args:
        at_least: The smallest number.
    """

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if number < at_least:
            raise argparse.ArgumentTypeError(f"must be at least {at_least}, got {number}")
        return number

    return read


def share(text: str) -> float:
    """A kind of option: shares of one.

    Args:
        text: What was typed.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1 (0.8 is 80 %), got {text}")
    return value
