"""The subcommands of ``pfl``, each with a line of help. What they need is imported when one is run."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OTHER_COMMANDS", "TRAINER_COMMANDS", "Command", "short_help"]

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
        function: ``module:function``; it is called with the list of words that follow the subcommand.
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
    "completion": Command("pfl_lightning.cli.completion:completion", "print a script for completion by the shell"),
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
