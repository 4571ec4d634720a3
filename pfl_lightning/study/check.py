"""Check of a run's config against the options of ``pfl fit``, without a run."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from pfl_lightning.cli.federated_cli import FederatedCLI
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.study.plan import Run
from pfl_lightning.study.yaml_file import write_yaml

__all__ = ["check_configs"]


class _Parsed(FederatedCLI):
    """``pfl fit`` up to where it would make what the config names."""

    def before_instantiate_classes(self) -> None:
        """Make no folder."""

    def instantiate_classes(self) -> None:
        """Make nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""

    def _set_seed(self) -> None:
        """Leave the random numbers as they are."""


def check_configs(runs: Sequence[Run]) -> None:
    """Parse the configs of runs as ``pfl fit`` does; of the runs of a cell, which differ in their seeds, the first.

    Args:
        runs: The runs.

    Raises:
        ConfigurationError: A config has an unknown option or a wrong value; it says which run, and all that is wrong.
    """
    firsts = {id(run.cell): run for run in reversed(runs)}
    wrong: dict[str, list[str]] = {}
    with TemporaryDirectory() as folder:
        parser = _Parser(Path(folder) / "run.yaml")
        for run in reversed(firsts.values()):
            error = parser.error_of(run)
            if error is not None:
                wrong.setdefault(error, []).append(run.cell.name)
    if wrong:
        said = [f"{names[0]}{_others(names)}: {error}" for error, names in wrong.items()]
        raise ConfigurationError("the study's configs do not fit pfl fit:\n" + "\n".join(said))


def _others(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


class _Parser:
    """The parser of ``pfl fit``, made once for all configs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cli: Any = None

    def error_of(self, run: Run) -> str | None:
        """What is wrong with the config of a run; ``None`` if it fits."""
        write_yaml(self.path, dict(run.config))
        words, said = ["fit", "--config", str(self.path)], io.StringIO()
        try:
            with redirect_stderr(said), warnings.catch_warnings(), patch.object(sys, "argv", sys.argv[:1]):
                warnings.simplefilter("ignore")
                if self.cli is None:
                    self.cli = _Parsed(words)
                else:
                    self.cli.parse_arguments(self.cli.parser, words)
        except SystemExit:
            return _sentence(said.getvalue())
        except (ValueError, TypeError) as error:
            return str(error)
        return None


def _sentence(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith("(all options")]
    return "; ".join(lines).removeprefix("pfl: ")
