"""The command line's parser: errors that say what the choices are."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from pfl_lightning import datamodules, engines, methods
from pfl_lightning.cli.messages import shorten
from pfl_lightning.encoders import encoder_names
from pfl_lightning.errors import ConfigurationError

__all__ = ["CLIParser", "apply_engine_option", "expand_engine_option"]


def _subclasses(module: Any, base: type) -> list[str]:
    names = module.__all__
    classes = {n: getattr(module, n) for n in names if inspect.isclass(getattr(module, n))}
    return [n for n, cls in classes.items() if issubclass(cls, base) and not inspect.isabstract(cls)]


def _choices(message: str) -> str:
    """Known names for the option that the message is about."""
    known = {
        "model.method": ("methods", [method.__name__ for method in methods.METHODS]),
        "model.encoder": ("encoders", encoder_names()),
        "model.engine": ("engines", _subclasses(engines, engines.Engine)),
        "partition": ("partitions", _subclasses(datamodules, datamodules.Partitioner)),
        "data": ("data modules", _subclasses(datamodules, datamodules.FederatedDataModule)),
    }
    for key, (kind, names) in known.items():
        if f'"{key}' in message or f"'{key}" in message or f"{key}:" in message:
            return f"known {kind}: {', '.join(names)}"
    return ""


def _options(message: str) -> str:
    """The options of the class whose option was misspelt."""
    wrong = re.search(r"(?:[Oo]ption|[Kk]ey|Nested key) '([\w.]+)' is not (?:accepted|expected)", message)
    paths = re.findall(r"class_path[= :]+'([\w.]+)'", message)
    if not wrong or not paths:
        return ""
    module, _, name = paths[-1].rpartition(".")
    cls = getattr(importlib.import_module(module), name, None)
    if cls is None:
        return ""
    options: set[str] = set()
    for base in cls.__mro__:  # as far as each passes options on to the next
        if "__init__" not in vars(base) or not base.__module__.startswith("pfl_lightning"):
            continue
        parameters = inspect.signature(base.__init__).parameters
        options |= {name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD}
        if all(one.kind is not one.VAR_KEYWORD for one in parameters.values()):
            break
    options -= {"self", "encoder", "num_classes"}
    near = difflib.get_close_matches(wrong.group(1), options, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}options of {name}: {', '.join(sorted(options))}"


ENGINES = {
    "sequential": "SequentialEngine",
    "vectorized": "VectorizedEngine",
    "ray": "RayEngine",
    "trainer": "TrainerEngine",
}
"""Engine classes by their names for ``--engine``."""


def expand_engine_option(args: Sequence[str]) -> list[str]:
    """Expand ``--engine NAME`` to ``--model.engine CLASS``, so that options of that class can follow."""
    found: list[str] = []
    waiting = list(args)
    while waiting:
        word = waiting.pop(0)
        option, equals, name = word.partition("=")
        if option == "--engine" and not equals and waiting:
            name = waiting.pop(0)
        engine = ENGINES.get(name) if option == "--engine" else None
        if engine is not None:
            found += ["--engine", "null", "--model.engine", engine]  # overrides `engine` of a config
        else:  # the parser says what is wrong with it
            found += [option, name] if option == "--engine" and not equals and name else [word]
    return found


def apply_engine_option(config: Namespace) -> None:
    """Move ``engine: NAME`` of a config file to ``model.engine``.

    Raises:
        ConfigurationError: ``model.engine`` is another engine.
    """
    if config.engine is None:
        return
    given = config.model.engine
    if given is None:
        config.model.engine = Namespace(class_path=f"pfl_lightning.{ENGINES[config.engine]}", init_args=Namespace())
    elif given.class_path.rpartition(".")[2] != ENGINES[config.engine]:
        raise ConfigurationError(f"engine is {config.engine!r}, model.engine is {given.class_path}: give one of them")
    config.engine = None


class CLIParser(LightningArgumentParser):
    """Lightning's parser with short errors that list the valid choices."""

    def print_usage(self, file: Any = None) -> None:
        """Print nothing: the list of all options would hide the error."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error and the known choices, and exit with status 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        hint = _options(message) or _choices(message)
        message = "\n".join(filter(None, (shorten(message), hint)))
        sys.stderr.write(f"pfl: {message}\n(all options: pfl SUBCOMMAND --help)\n")
        self.exit(2)
