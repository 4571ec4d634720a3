"""The command line: ``pfl fit | validate | test | personalize | export | predict | partition | methods | ...``."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import pkgutil
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pfl_lightning
from pfl_lightning.cli.commands import OTHER_COMMANDS, TRAINER_COMMANDS, short_help
from pfl_lightning.cli.config_files import check_config_files
from pfl_lightning.cli.messages import NEAR
from pfl_lightning.errors import ConfigurationError, FederationError, UsageError, is_out_of_memory, refused
from pfl_lightning.names import nearest
from pfl_lightning.state.files import explain_output

REPORTED = (FederationError, ValueError, OSError, RecursionError, MemoryError, OverflowError)
"""Errors that are told in a sentence, without a traceback; Lightning's own, too."""

HELP = """usage: pfl SUBCOMMAND [options]

Personalized federated learning on PyTorch Lightning. A run is a config:
pfl fit --config configs/fedpac_digits.yaml

{commands}

pfl SUBCOMMAND --help describes its options; pfl --version prints the version."""


def help_text() -> str:
    """What ``pfl --help`` prints: every subcommand in a line."""
    lines = {**TRAINER_COMMANDS, **{name: text for name, (_, text) in OTHER_COMMANDS.items()}}
    width = max(len(name) for name in lines)
    return HELP.format(commands="\n".join(f"  {name:{width}}  {line}" for name, line in lines.items()))


def _answer(argv: list[str]) -> bool:
    """Answer what needs no import of a subcommand: help, version, and words that are no subcommand.

    Raises:
        UsageError: The first word is no subcommand.
    """
    first, known = argv[0] if argv else "", [*TRAINER_COMMANDS, *OTHER_COMMANDS]
    if first in ("-h", "--help"):
        print(help_text())
    elif first == "--version":
        print(f"pfl_lightning {pfl_lightning.__version__}")
    elif not argv:
        sys.stderr.write(f"{help_text()}\n")
        sys.exit(2)
    elif first in TRAINER_COMMANDS and _topic(argv) == "":
        print(short_help(first))
    elif first in known:
        return False
    elif first.startswith("-"):
        raise UsageError(f"options follow a subcommand\ndid you mean pfl fit {' '.join(argv)}")
    else:
        near = nearest(first, known, NEAR)
        hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
        raise UsageError(f"there is no subcommand {first!r}\n{hint}\n(pfl --help describes them)")
    return True


def _quiet() -> None:
    """Ignore warnings and tips about ordinary training that mislead here."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", module="lightning.pytorch.utilities._pytree")
    warnings.filterwarnings("ignore", "LightningCLI's args parameter is intended.*")  # it gets them expanded
    # Of a default of the package's own, a tuple, which YAML writes as a list.
    warnings.filterwarnings("ignore", r"\s*Dump of a value that does not round-trip")
    # A run's folder is its own: it is not empty where the run goes on.
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    for package in ("lightning.pytorch", "pytorch_lightning"):
        log = logging.getLogger(f"{package}.utilities.rank_zero")
        log.addFilter(lambda record: "Tip: For seamless cloud" not in record.getMessage())


OWN = re.compile(rf"{re.escape(str(Path(__file__).parents[1]))}/\S+\.py:\d+: (?:UserWarning: |(?!\w+Warning: ))")
"""How Python begins a warning of the package; a line of code follows the message. Lightning leaves category and code
out for every file with its name in the path, which are ours, too."""


def _log_warnings_plainly() -> None:
    """Send warnings to Python's log of warnings, which prints the package's as sentences and others as they are.

    For a process that is ``pfl`` and nothing else: a program that calls ``main`` sees warnings as ever.
    """
    logger, handler = logging.getLogger("py.warnings"), logging.StreamHandler()
    handler.terminator = ""  # a warning ends with one
    handler.format = lambda record: without_place(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.propagate = False
    logging.captureWarnings(True)


def without_place(text: str) -> str:
    """A warning as Python formats it; of the package's own, the message alone.

    Args:
        text: The warning, with the place that gave it and the line of code.
    """
    own = OWN.match(text)
    if own is None:
        return text
    message = re.sub(r"\n  \S.*\n$", "", text[own.end() :])
    return f"pfl: warning: {message.rstrip()}\n"


WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user says how threads wait for one another."""


def wait_passively() -> None:
    """Let threads that wait for one another sleep: spinning, they keep each other from cores that others use, too.

    The variable is read when torch is imported, and worker processes inherit it.
    """
    if "torch" not in sys.modules and not any(os.environ.get(name) for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "passive"


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without garbage collections, which can take longer than the imports: what imports make stays."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run(argv: list[str], args: list[str] | None) -> None:
    wait_passively()
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:  # a config may name modules there; those installed come first
        sys.path.append(here)
    check_config_files(argv)
    if argv[0] == "predict" and any(word.partition("=")[0] == "--exported" for word in argv):
        try:  # of files alone: without a run's options
            pkgutil.resolve_name("pfl_lightning.cli.exported:predict")(argv[1:])
        except (ConfigurationError, ValueError) as error:
            raise refused(error) from error
    elif argv[0] in OTHER_COMMANDS:
        pkgutil.resolve_name(OTHER_COMMANDS[argv[0]][0])(argv[1:])
    else:
        with uncollected():
            from pfl_lightning.cli.federated_cli import FederatedCLI
        if args is None:  # this process is pfl
            gc.freeze()

        topic = _topic(argv)
        if topic is not None:  # the options of a subcommand, all or those of a group
            from pfl_lightning.cli.parser import help_topic

            reset = help_topic.set(topic.strip("-").removesuffix("."))
            try:
                FederatedCLI(args=[argv[0], "--help"])
            finally:
                help_topic.reset(reset)
        try:
            FederatedCLI(args=args)
        except UsageError:
            raise
        except ConfigurationError as error:  # a value without meaning may come to light when clients are made
            raise refused(error) from error


def _topic(argv: list[str]) -> str | None:
    """What help is asked about: ``pfl fit --help trainer``; empty: in general."""
    for option, following in itertools.pairwise([*argv[1:], ""]):
        word, _, topic = option.partition("=")
        if word in ("-h", "--help"):
            return topic or ("" if following.startswith("-") else following)
    return None


def _is_reported(error: Exception) -> bool:
    """Whether an error is told in a sentence; Lightning's class is not imported for that."""
    lightning = sys.modules.get("lightning.fabric.utilities.exceptions")
    if is_out_of_memory(error):
        return True
    if isinstance(error, (RuntimeError, ZeroDivisionError)):  # Lightning's own, or an optimizer's or scheduler's
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        raised_in = str(frame.f_globals.get("__name__"))
        if raised_in.startswith(("lightning.", "pytorch_lightning.", "torch.optim.")):
            return True
    return isinstance(error, (*REPORTED, lightning.MisconfigurationException) if lightning else REPORTED)


def main(args: list[str] | None = None) -> None:
    """Entry point of ``pfl``."""
    argv = sys.argv[1:] if args is None else args
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: the next file would get its number, and what is printed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process lasts
    if args is None:  # this process is pfl
        _log_warnings_plainly()
    try:
        with explain_output():
            if not _answer(argv):
                _quiet()
                _run(argv, args)
    except KeyboardInterrupt:  # outside of the Trainer, which the CLI answers for
        sys.exit(130)
    except Exception as error:
        if os.environ.get("PFL_DEBUG") or not _is_reported(error):
            raise
        where = "\n(PFL_DEBUG=1 shows where)"
        if isinstance(error, UsageError) or hasattr(error, "is_mistaken_data"):
            sys.stderr.write(f"pfl: {_sentence(error)}{where if error.__cause__ else ''}\n")
            sys.exit(2)
        sys.exit(f"pfl: {_sentence(error)}{where}")


def _sentence(error: Exception) -> str:
    """What an error says, with its notes."""
    from pfl_lightning.cli.messages import shorten

    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    text = str(error)
    if isinstance(error, RecursionError):
        text = "lists or mappings are nested too deeply, or within themselves: check the config"
    elif is_out_of_memory(error) and not isinstance(error, FederationError):
        text = f"out of memory, lower sizes in the config{f': {text}' if text else ''}"
    elif isinstance(error, OverflowError):
        text = f"a number in the config is too large: {text}"
    return f"{shorten(text)}{notes}"


if __name__ == "__main__":
    main()
