"""The command line: ``pfl fit | validate | test | personalize | export | partition | compare | study | ...``."""

from __future__ import annotations

import os
import sys
import warnings

from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.console import Console

from pfl_lightning.callbacks import architecture_table
from pfl_lightning.cli.compare import compare, tensorboard
from pfl_lightning.cli.federated_cli import FederatedCLI
from pfl_lightning.cli.messages import shorten
from pfl_lightning.cli.tables import encoders_table, methods_table
from pfl_lightning.errors import FederationError

__all__ = ["main"]


def print_methods(args: list[str]) -> None:
    """Print the methods with paper and year, and the encoders; with a config, the architectures of its federation."""
    if {"-h", "--help"} & set(args):
        print(
            "usage: pfl methods                  the methods and the encoders\n"
            "       pfl methods --config FILE    the architectures of a run, and how many clients have each"
        )
        return None
    if args:
        cli = FederatedCLI(args=args, run=False)
        cli.datamodule.prepare_data()
        cli.datamodule.setup("fit")
        rows, number = cli.model.describe(cli.datamodule), cli.datamodule.num_clients
        return Console().print(architecture_table(rows, f"{number} clients"))
    Console().print(methods_table())
    Console().print(encoders_table())
    return None


REPORTED = (
    *(FederationError, MisconfigurationException, ValueError, OSError),
    *(RecursionError, MemoryError, OverflowError),
)
"""Errors that are told in a sentence, without a traceback."""


def study(args: list[str]) -> None:
    """Run what is not done of a study file."""
    from pfl_lightning.study.command import study

    study(args)


def reproduce(args: list[str]) -> None:
    """Run a study that ships with the package."""
    from pfl_lightning.study.reproduce import reproduce

    reproduce(args)


OTHER_COMMANDS = {
    "methods": print_methods,
    "compare": compare,
    "tensorboard": tensorboard,
    "study": study,
    "reproduce": reproduce,
}
"""Subcommands that need no Trainer."""


def _quiet() -> None:
    """Ignore warnings about ordinary training that mislead here."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", module="lightning.pytorch.utilities._pytree")
    warnings.filterwarnings("ignore", "LightningCLI's args parameter is intended.*")  # pfl methods --config


def main(args: list[str] | None = None) -> None:
    """Entry point of ``pfl``."""
    words = sys.argv[1:] if args is None else args
    _quiet()
    try:
        if words[:1] and words[0] in OTHER_COMMANDS:
            OTHER_COMMANDS[words[0]](words[1:])
        else:
            FederatedCLI(args=args)
    except KeyboardInterrupt:  # outside of the Trainer, which the CLI answers for
        sys.exit(130)
    except REPORTED as error:
        if os.environ.get("PFL_DEBUG"):
            raise
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        if isinstance(error, RecursionError):
            error = RecursionError("lists or mappings are nested too deeply, or within themselves: check the config")
        if isinstance(error, MemoryError):
            error = MemoryError(f"out of memory: {str(error) or 'lower sizes in the config'}")
        if isinstance(error, OverflowError):
            error = OverflowError(f"a number in the config is too large: {error}")
        sys.exit(f"pfl: {shorten(str(error))}{notes}\n(PFL_DEBUG=1 shows where)")
    return None


if __name__ == "__main__":
    main()
