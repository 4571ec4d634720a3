"""The command line's parser: errors that say what the choices are."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

# The parser knows classes that are imported by their names alone.
from pfl_lightning import datamodules, engines, methods, self_supervised  # noqa: F401
from pfl_lightning.cli.messages import explain
from pfl_lightning.errors import UsageError
from pfl_lightning.names import nearest
from pfl_lightning.runs.config import CLIPPING, is_below

ENGINES = {
    "sequential": "SequentialEngine",
    "vectorized": "VectorizedEngine",
    "processes": "ProcessEngine",
    "ray": "RayEngine",
    "trainer": "TrainerEngine",
}
"""Engine classes by their names for ``--engine``."""


def expand_engine_option(args: Sequence[str]) -> list[str]:
    """Expand ``--engine NAME`` to ``--model.engine CLASS``, so that options of that class can follow."""
    words: list[str] = []
    for word in args:
        if words[-1:] == ["--engine"]:
            words[-1] += f"={word}"
        else:
            words.append(word)
    # `null` overrides `engine` of a config. Of an unknown name the parser says what is wrong with it.
    expanded = {f"--engine={name}": ["--engine", "null", "--model.engine", engine] for name, engine in ENGINES.items()}
    return [part for word in words for part in expanded.get(word, [word])]


def apply_engine_option(config: Namespace) -> None:
    """Move ``engine: NAME`` of a config file to ``model.engine``.

    Raises:
        UsageError: ``model.engine`` is another engine.
    """
    if config.engine is None:
        return
    given = config.model.engine
    if given is None:
        config.model.engine = Namespace(class_path=f"pfl_lightning.{ENGINES[config.engine]}", init_args=Namespace())
    elif given.class_path.rpartition(".")[2] != ENGINES[config.engine]:
        raise UsageError(f"engine is {config.engine!r}, model.engine is {given.class_path}: give one of them")
    config.engine = None


def apply_metrics_option(config: Namespace) -> None:
    """Move ``metrics`` to ``model.metrics``.

    Raises:
        UsageError: ``model.metrics`` has others.
    """
    if config.metrics:
        if config.model.metrics and [*config.model.metrics] != [*config.metrics]:
            raise UsageError(f"metrics is {config.metrics}, model.metrics is {config.model.metrics}: give one of them")
        config.model.metrics, config.metrics = config.metrics, []


def apply_clipping(config: Namespace) -> None:
    """Move ``trainer.gradient_clip_val`` to the engine, which trains the clients: the outer Trainer has no gradients.

    0 is no clipping, as for any Trainer.

    Args:
        config: The subcommand's options.

    Raises:
        UsageError: The engine has another value of its own, or cannot clip.
    """
    given = {name: config.trainer[name] for name in CLIPPING if config.trainer[name] is not None}
    for name in given:
        config.trainer[name] = None
    if not given or (config.model.engine is None and not any(given.values())):
        return
    place, path = config.model, "model.engine"
    while True:
        if place.get("engine") is None:
            place.engine = Namespace(class_path="pfl_lightning.SequentialEngine", init_args=Namespace())
        engine = place.engine
        arguments = inspect.signature(pkgutil.resolve_name(engine.class_path)).parameters
        if "engine" not in arguments or {*given} <= {*arguments}:
            break
        place, path = engine.init_args, f"{path}.init_args.engine"  # an engine of workers, and theirs
    for name, value in given.items():
        own = engine.init_args.get(name)
        if name not in arguments:
            if value:
                raise UsageError(f"trainer.{name} is {value!r}, but {engine.class_path} has no such option")
        elif own not in (None, value, arguments[name].default):
            raise UsageError(f"trainer.{name} is {value!r}, {path}.init_args.{name} is {own!r}: give one of them")
        else:
            engine.init_args[name] = value or None


help_topic: ContextVar[str] = ContextVar("help_topic", default="all")
"""What help is about: ``"all"`` options, or the group whose options begin with this."""


class CLIParser(LightningArgumentParser):
    """Lightning's parser with short errors that list the valid choices, and without abbreviations of options."""

    def __init__(self, *args: Any, command: str = "", **options: Any) -> None:
        self._command = command  # that was typed, whose options an error proposes
        # The beginning of a name would be taken for the option, until another one begins so.
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def print_usage(self, file: Any = None) -> None:
        """Print nothing: the list of all options would hide the error."""

    def format_help(self, *args: Any, **options: Any) -> str:
        """All options, or those of the groups that the help is about."""
        topic = help_topic.get()
        if topic == "all":
            return str(super().format_help(*args, **options))
        formatter = self._get_formatter()
        for group in self._action_groups:
            chosen = [a for a in group._group_actions if any(is_below(o.lstrip("-"), topic) for o in a.option_strings)]
            if chosen:
                formatter.start_section(group.title)
                formatter.add_arguments(chosen)
                formatter.end_section()
        near = nearest(topic, {option.partition(".")[0] for option in all_options(self)})
        return formatter.format_help() or f"no options --{topic}: try --help {near or 'all'}\n"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error and the known choices, and exit with status 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        message = explain(message, all_options(self), self._command)
        sys.stderr.write(f"pfl: {message}\n(all options: pfl SUBCOMMAND --help all)\n")
        self.exit(2)


def all_options(parser: Any) -> Iterator[str]:
    """Options of a parser and of its subcommands, without dashes."""
    for action in parser._actions:
        yield from (option.lstrip("-") for option in action.option_strings if option.startswith("--"))
        if isinstance(action.choices, dict):  # the subcommands
            for subcommand in action.choices.values():
                yield from all_options(subcommand)
