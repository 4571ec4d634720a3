"""Check of runs' configs against the options of ``pfl fit``, without a run."""

from __future__ import annotations

import io
import multiprocessing
import signal
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from pfl_lightning.errors import UsageError
from pfl_lightning.study.definition.options import Config, write_yaml
from pfl_lightning.study.definition.plan import Run

__all__ = ["check_configs", "config_errors"]


def check_configs(runs: Sequence[Run]) -> None:
    """Parse the configs of runs as ``pfl fit`` does, and make what they name, without reading data.

    Of the runs of a cell, which differ in their seeds, the first is checked.

    A process of its own does it, which takes torch and the parser with it when it ends.

    Args:
        runs: The runs.

    Raises:
        UsageError: A config has an unknown option or a wrong value; it says which run, and all that is wrong.
    """
    firsts = list({id(run.cell): run for run in reversed(runs)}.values())[::-1]
    ignored = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the study
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=signal.signal, initargs=ignored) as pool:
        errors = pool.submit(config_errors, [run.config for run in firsts]).result()
    wrong: dict[str, list[str]] = {}
    for run, error in zip(firsts, errors, strict=True):
        if error is not None:
            wrong.setdefault(error, []).append(run.cell.name)
    if wrong:
        said = [f"{names[0]}{_others(names)}: {error}" for error, names in wrong.items()]
        raise UsageError("the study's configs do not fit pfl fit:\n" + "\n".join(said))


def _others(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def config_errors(configs: Sequence[Config]) -> list[str | None]:
    """What is wrong with each of some configs; ``None`` for one that fits.

    Args:
        configs: The configs.
    """
    with TemporaryDirectory() as folder, patch.object(sys, "argv", sys.argv[:1]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the runs themselves give them
        parser = _Parser(Path(folder) / "run.yaml")
        return [parser.error_of(config) for config in configs]


class _Parser:
    """The parser of ``pfl fit``, made once for all configs.

    Args:
        path: A file that each config is written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cli: Any = None

    def error_of(self, config: Config) -> str | None:
        """What is wrong with a config; ``None`` if it fits."""
        write_yaml(self.path, dict(config))
        argv, said = ["fit", "--config", str(self.path)], io.StringIO()
        try:
            with redirect_stderr(said):
                if self.cli is None:
                    self.cli = _parsed_cli(argv)
                else:
                    self.cli.parse_arguments(self.cli.parser, argv)
                return self._value_error()
        except SystemExit:
            return _sentence(said.getvalue())
        except (ValueError, TypeError) as error:
            from pfl_lightning.cli.options.messages import shorten

            return shorten(str(error))

    def _value_error(self) -> str | None:
        """Values of the right kind that a run would refuse at once: what the config names is made, without its data."""
        from pfl_lightning.cli.options.allowed import check_names

        config = self.cli.config["fit"]
        rounds = config["trainer"]["max_epochs"]
        if rounds is None or rounds < 0:
            return f"trainer.max_epochs: a study's runs need a number of rounds of at least 0, got {rounds}"
        if config.get("ckpt_path") is not None:
            return "ckpt_path: the runs of a study go on by themselves; leave it out"
        check_names(config)
        try:
            made = self.cli.parser.instantiate_classes(self.cli.config)
        except (ValueError, TypeError):
            raise
        except (OSError, RuntimeError, LookupError, AttributeError):
            return None  # a class of the user's may need files that only the machine of the run has
        return _method_error(made["fit"]["model"], config["model"])


def _method_error(model: Any, config: Any) -> str | None:
    """An argument of the method that its client refuses, which a run would make only once it has its data.

    The client is made on a layer in place of the encoder. So a refusal counts where it begins with the name of an
    argument: others may be of the layer.
    """
    from torch import nn

    try:
        names = config["method"]["init_args"].keys()
        model.method_factory(nn.Linear(8, 8), 2)
    except ValueError as error:
        words = str(error).split()
        return f"model.method.init_args.{error}" if words and words[0] in names else None
    except Exception:  # whatever a class of the user's needs of the encoder that it has in the run
        return None
    return None


def _parsed_cli(argv: list[str]) -> Any:
    """``pfl fit`` up to where it would make what the config names."""
    from pfl_lightning.cli.federated_cli import FederatedCLI

    class Parsed(FederatedCLI):
        def before_instantiate_classes(self) -> None:
            pass

        def instantiate_classes(self) -> None:
            pass

        def _run_subcommand(self, subcommand: str) -> None:
            pass

        def _set_seed(self) -> None:
            pass

    return Parsed(argv)


def _sentence(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith("(all options")]
    return "; ".join(lines).removeprefix("pfl: ")
