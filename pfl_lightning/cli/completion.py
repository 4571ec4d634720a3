"""``pfl completion``: a script that lets the shell complete subcommands, options and choices."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, get_args

from pfl_lightning.cli.commands import OTHER_COMMANDS, TRAINER_COMMANDS
from pfl_lightning.cli.options.words import WordParser
from pfl_lightning.errors import ConfigurationError

__all__ = ["completion"]

DESCRIPTION = """Print a completion script, made by shtab (pip install "pfl-lightning[completion]").
bash, for this user: pfl completion bash > ~/.local/share/bash-completion/completions/pfl
zsh: a file named _pfl in a folder of $fpath. A new shell has it then."""


FOLDERS = ("run_dir", "output", "data.root", "data.init_args.root", "trainer.default_root_dir")
FILES = ("config", "ckpt_path")
"""Options whose values are paths."""


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
    for name, options in _options_of_runs().items():
        one = subcommands.add_parser(name, help=TRAINER_COMMANDS[name])
        for option in options:
            action = one.add_argument(f"--{option}", choices=_choices(option), help="")
            if option in (*FILES, *FOLDERS):
                action.complete = shtab.FILE if option in FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
    parsers = {**_options_of_studies(), **_words_of_commands()}
    for name, command in OTHER_COMMANDS.items():
        parents = [parsers[name]] if name in parsers else []  # which have --help
        subcommands.add_parser(name, help=command.help, parents=parents, add_help=not parents)
    script = str(shtab.complete(parser, shell))
    # Where the script has nothing to offer, bash offers files, as it does for any command.
    return re.sub(r"^complete (?=.*-F _shtab)", "complete -o default ", script, flags=re.MULTILINE)


def _words_of_commands() -> dict[str, argparse.ArgumentParser]:
    """What follows ``pfl compare``, ``tensorboard``, ``methods`` and ``completion``."""
    import shtab

    from pfl_lightning.cli.compare import compare_parser
    from pfl_lightning.cli.methods import FILTERS
    from pfl_lightning.cli.options.suggestions import known_names

    found = {"compare": compare_parser(), "completion": completion_parser()}
    paths = [action for action in found["compare"]._actions if action.dest in ("runs", "output")]
    found["tensorboard"] = argparse.ArgumentParser()
    paths.append(found["tensorboard"].add_argument("runs", nargs="+"))
    for action in paths:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    found["methods"] = argparse.ArgumentParser()
    for name in FILTERS:
        found["methods"].add_argument(name, action="store_true")
    found["methods"].add_argument("--config").complete = shtab.FILE  # type: ignore[attr-defined]
    found["methods"].add_argument("names", nargs="*", choices=known_names()["model.method"]()[1])
    return found


def _options_of_studies() -> dict[str, argparse.ArgumentParser]:
    """The parsers of ``pfl study``, which takes a file, and ``pfl reproduce``, which takes a study that ships."""
    import shtab

    from pfl_lightning.study.arguments import study_parser
    from pfl_lightning.study.command import shipped_studies

    found = {
        "study": study_parser("study", "FILE", ""),
        "reproduce": study_parser("reproduce", "NAME", ""),
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
    if option == "personalize.train":
        from pfl_lightning.phases import Trained

        return get_args(Trained)
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
