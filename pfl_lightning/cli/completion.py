"""``pfl completion``: a script that lets the shell complete subcommands, options and choices."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pfl_lightning.cli.commands import OTHER_COMMANDS, TRAINER_COMMANDS
from pfl_lightning.cli.options.words import WordParser
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
    parser = WordParser(
        prog="pfl completion", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    shell = parser.parse_args(args).shell
    if importlib.util.find_spec("shtab") is None:
        raise ConfigurationError('pfl completion needs shtab: pip install "pfl-lightning[completion]"')
    print(_script(shell))


def _script(shell: str) -> str:
    import shtab

    from pfl_lightning.cli.compare import compare_parser

    parser = argparse.ArgumentParser(prog="pfl")
    subcommands = parser.add_subparsers()
    for name, options in _options_of_runs().items():
        one = subcommands.add_parser(name, help=TRAINER_COMMANDS[name])
        for option in options:
            action = one.add_argument(f"--{option}", choices=_choices(option), help="")
            if option == "config":
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    parsers = {**_options_of_studies(), "compare": compare_parser()}
    for name, command in OTHER_COMMANDS.items():
        parents = [parsers[name]] if name in parsers else []  # which have --help
        subcommands.add_parser(name, help=command.help, parents=parents, add_help=not parents)
    return str(shtab.complete(parser, shell))


def _options_of_studies() -> dict[str, argparse.ArgumentParser]:
    """The parsers of ``pfl study``, which takes a file, and ``pfl reproduce``, which takes a study that ships."""
    import shtab

    from pfl_lightning.study.arguments import study_parser
    from pfl_lightning.study.reproduce import shipped_studies

    found = {
        "study": study_parser("study", "FILE", "", estimate=False),
        "reproduce": study_parser("reproduce", "NAME", "", estimate=True),
    }
    for name, parser in found.items():
        actions = {action.dest: action for action in parser._actions}
        actions["output"].complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        if name == "study":
            actions["study"].complete = shtab.FILE  # type: ignore[attr-defined]
        else:
            actions["study"].choices = tuple(shipped_studies())
    return found


def _choices(option: str) -> Sequence[str] | None:
    """Names that may follow an option."""
    from pfl_lightning.cli.options.parser import ENGINES
    from pfl_lightning.cli.options.suggestions import known_names

    known = known_names()
    if option == "engine":
        return tuple(ENGINES)
    return tuple(known[option]()[1]) if option in known and option != "trainer.callbacks" else None


def _options_of_runs() -> dict[str, list[str]]:
    """Options of each subcommand that has a Trainer, with frequent ones of the classes that configs name."""
    from pfl_lightning.cli.federated_cli import FederatedCLI
    from pfl_lightning.cli.options.nearest import OF_CLASSES
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
