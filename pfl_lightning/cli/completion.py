"""``pfl completion``: a script that lets the shell complete subcommands, options and choices."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, get_args

from pfl_lightning.cli.commands import OTHER_COMMANDS, TRAINER_COMMANDS, WordParser
from pfl_lightning.errors import ConfigurationError

__all__ = ["completion"]

DESCRIPTION = """Print a completion script, made by shtab (pip install "pfl-lightning[completion]").
bash, for this user: pfl completion bash > ~/.local/share/bash-completion/completions/pfl
zsh: a file named _pfl in a folder of $fpath. A new shell has it then."""


def completion(args: Sequence[str]) -> None:
    """``pfl completion bash|zsh|tcsh``: print a completion script.

    Raises:
        ConfigurationError: shtab is not installed.
    """
    shell = completion_parser().parse_args(args).shell
    if importlib.util.find_spec("shtab") is None:
        raise ConfigurationError('pfl completion needs shtab: pip install "pfl-lightning[completion]"')
    print(_script(shell))


def completion_parser() -> argparse.ArgumentParser:
    """The parser of ``pfl completion``."""
    parser = WordParser(
        prog="pfl completion", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    return parser


def _script(shell: str) -> str:
    import shtab

    parser = argparse.ArgumentParser(prog="pfl")
    subcommands = parser.add_subparsers()
    choices = _choices()
    for name, options in _options_of_runs().items():
        one = subcommands.add_parser(name, help=TRAINER_COMMANDS[name])
        for option in options:
            one.add_argument(f"--{option}", choices=choices.get(option), help="")
    parsers = _parsers()
    for name, command in OTHER_COMMANDS.items():
        parents = [parsers[name]] if name in parsers else []  # which have --help
        subcommands.add_parser(name, help=command.help, parents=parents, add_help=not parents)
    script = str(shtab.complete(parser, shell))
    # Where the script has nothing to offer, bash offers files, as it does for any command.
    return re.sub(r"^complete (?=.*-F _shtab)", "complete -o default ", script, flags=re.MULTILINE)


def _parsers() -> dict[str, argparse.ArgumentParser]:
    """Parsers of commands without a Trainer."""
    from pfl_lightning.cli.compare import compare_parser
    from pfl_lightning.cli.methods import FILTERS
    from pfl_lightning.study.arguments import study_parser
    from pfl_lightning.study.command import shipped_studies

    reproduce, methods = study_parser("reproduce", "NAME", ""), argparse.ArgumentParser()
    next(action for action in reproduce._actions if action.dest == "study").choices = tuple(shipped_studies())
    for name in (*FILTERS, "--config"):
        methods.add_argument(name)
    methods.add_argument("names", nargs="*", choices=_choices()["model.method"])
    found = {"study": study_parser("study", "FILE", ""), "reproduce": reproduce, "methods": methods}
    return {**found, "compare": compare_parser(), "completion": completion_parser()}


def _choices() -> dict[str, Sequence[str]]:
    """Names that may follow an option."""
    from pfl_lightning.cli.options.names import KINDS, known_names
    from pfl_lightning.cli.options.parser import ENGINES
    from pfl_lightning.phases import Trained

    known = {option: known_names(option)[1] for option in KINDS if option != "trainer.callbacks"}
    return {**known, "engine": tuple(ENGINES), "personalize.train": get_args(Trained)}


def _options_of_runs() -> dict[str, list[str]]:
    """Options of each subcommand that has a Trainer, with frequent ones of the classes that configs name."""
    from pfl_lightning.cli.federated_cli import FederatedCLI
    from pfl_lightning.cli.options.names import OF_CLASSES
    from pfl_lightning.cli.options.parser import all_options

    found: list[Any] = []

    class ParserAlone(FederatedCLI):
        """Keeps the parser and stops there."""

        def parse_arguments(self, parser: Any, args: Any) -> None:
            found.append(parser)
            raise StopIteration

    with suppress(StopIteration):
        ParserAlone(args=[])  # no subcommand is typed: all are built
    parsers = next(action.choices for action in found[0]._actions if isinstance(action.choices, dict))
    return {name: sorted({*all_options(parser), *OF_CLASSES} - {"help"}) for name, parser in parsers.items()}
