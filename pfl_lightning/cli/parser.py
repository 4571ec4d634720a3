"""The command line's parser: errors that say what the choices are."""

from __future__ import annotations

import difflib
import inspect
import pkgutil
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


def _choices(option: str) -> str:
    """Known names for the option that an error is about."""
    known = {
        "model.method": ("methods", [method.__name__ for method in (*methods.METHODS, *methods.ADAPTER_METHODS)]),
        "model.encoder": ("encoders", encoder_names()),
        "model.engine": ("engines", _subclasses(engines, engines.Engine)),
        "data.partition": ("partitions", _subclasses(datamodules, datamodules.Partitioner)),
        "data": ("data modules", _subclasses(datamodules, datamodules.FederatedDataModule)),
    }
    if option not in known:
        return ""
    kind, names = known[option]
    return f"known {kind}: {', '.join(names)}"


def _options(message: str) -> str | None:
    """The options of the class whose option was misspelt; ``None`` if that is not what the error is about."""
    wrong = re.search(r"(?:[Oo]ption|[Kk]ey|Nested key) '([\w.]+)' is not (?:accepted|expected)", message)
    if not wrong:
        return None
    before = re.search(r"class_path '([\w.]+)':\s*$", message[: wrong.start()])
    after = re.match(r"\.? Got value: \w*[({]'?class_path'?[=:] ?'([\w.]+)'", message[wrong.end() :])
    path = before or after
    if not path:
        return ""
    cls = pkgutil.resolve_name(path[1])
    options = _arguments(cls)
    near = difflib.get_close_matches(wrong[1], options - {wrong[1]}, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}options of {cls.__name__}: {', '.join(sorted(options))}" if options else ""


def _arguments(cls: type) -> set[str]:
    """Arguments of a class, as far as each of its bases passes options on to the next."""
    options: set[str] = set()
    packages = {"pfl_lightning", cls.__module__.partition(".")[0]}
    for base in inspect.getmro(cls):
        if "__init__" not in vars(base) or base.__module__.partition(".")[0] not in packages:
            continue
        parameters = inspect.signature(base).parameters.values()
        options |= {one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
        if all(one.kind is not one.VAR_KEYWORD for one in parameters):
            break
    return options - {"encoder", "num_classes", "input_shape", "params"}  # given by the federation


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
        short = shorten(message)
        hint = _options(message)
        if hint is None:
            hint = _choices(short.partition(": ")[0])
        message = "\n".join(filter(None, (short, hint)))
        sys.stderr.write(f"pfl: {message}\n(all options: pfl SUBCOMMAND --help)\n")
        self.exit(2)
