"""Check of runs' configs against the options of ``pfl fit``, without a run."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from pfl_lightning.errors import ConfigurationError, UsageError
from pfl_lightning.jobs.processes import last_lines
from pfl_lightning.jobs.supervision import Job, Jobs, Starter, how_it_ended
from pfl_lightning.runs.changes import listed_some
from pfl_lightning.study.options import Config, write_yaml
from pfl_lightning.study.plan import Run


def check_configs(runs: Sequence[Run], starter: Starter) -> None:
    """Parse the configs of runs as ``pfl fit`` does, and make what they name, without reading data.

    Of the runs of a cell, which differ in their seeds, the first is checked.

    A process of its own does it, which takes torch and the parser with it when it ends.

    Args:
        runs: The runs.
        starter: Starts the process.

    Raises:
        UsageError: A config has an unknown option or a wrong value; it says which run, and all that is wrong.
        ConfigurationError: The process has failed.
    """
    firsts = list({id(run.cell): run for run in reversed(runs)}.values())[::-1]
    with TemporaryDirectory() as folder:
        path = Path(folder, "configs")
        path.write_bytes(pickle.dumps([dict(run.config) for run in firsts]))
        job = Job((str(path),), path.with_name("log.txt"), entry=f"{__name__}:answer")
        for ended in Jobs(starter).run(iter([job])):
            import_module("matplotlib.figure")  # for the tables, while the other process imports torch
            code = 0 if ended is None else ended[1]
        if code:
            said = last_lines(job.log)
            raise ConfigurationError(f"the process that checks the study's configs {how_it_ended(code)}:\n{said}")
        errors = pickle.loads(path.read_bytes())
    wrong: dict[str, list[str]] = {}
    for run, error in zip(firsts, errors, strict=True):
        if error is not None:
            wrong.setdefault(error, []).append(run.cell.name)
    if wrong:
        lines = "\n".join(f"{listed_some(names)}: {error}" for error, names in wrong.items())
        raise UsageError(f"the study's configs do not fit pfl fit:\n{lines}")


def answer() -> None:
    """Put what is wrong with configs into their file, which the command line names."""
    path = Path(sys.argv[1])
    path.write_bytes(pickle.dumps(config_errors(pickle.loads(path.read_bytes()))))


def config_errors(configs: Sequence[Config]) -> list[str | None]:
    """What is wrong with each of some configs; ``None`` for one that fits.

    Args:
        configs: The configs.
    """
    from pfl_lightning.cli.federated_cli import ParsedCLI
    from pfl_lightning.cli.messages import shorten

    found: list[str | None] = []
    with TemporaryDirectory() as folder, patch.object(sys, "argv", sys.argv[:1]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the runs themselves give them
        path = Path(folder) / "run.yaml"
        for config in configs:
            write_yaml(path, dict(config))
            argv, printed = ["fit", "--config", str(path)], io.StringIO()
            try:
                with redirect_stderr(printed):
                    found.append(_value_error(ParsedCLI(argv)))
            except SystemExit:
                lines = [
                    line for line in printed.getvalue().splitlines() if line and not line.startswith("(all options")
                ]
                found.append("; ".join(lines).removeprefix("pfl: "))
            except (ValueError, TypeError) as error:
                found.append(shorten(str(error)))
    return found


def _value_error(cli: Any) -> str | None:
    """Values of the right kind that a run would refuse at once: what the config names is made, without its data.

    The method's client is made on a layer in place of the encoder, which a run has only with its data. So a refusal of
    it counts where it begins with the name of an argument: others may be of the layer.
    """
    from torch import nn

    from pfl_lightning.cli.allowed import check_names

    config = cli.config["fit"]
    rounds = config["trainer"]["max_epochs"]
    if rounds is None or rounds < 0:
        return f"trainer.max_epochs: a study's runs need a number of rounds of at least 0, got {rounds}"
    if config.get("ckpt_path") is not None:
        return "ckpt_path: the runs of a study resume by themselves; leave it out"
    check_names(config)
    try:
        made = cli.parser.instantiate_classes(cli.config)
    except (OSError, RuntimeError, LookupError, AttributeError) as error:
        if isinstance(error, ValueError):
            raise
        return None  # a class of the user's may need files that only the machine of the run has
    try:
        names = config["model"]["method"]["init_args"].keys()
        made["fit"]["model"].method_factory(nn.Linear(8, 8), 2)
    except ValueError as error:
        words = str(error).split()
        return f"model.method.init_args.{error}" if words and words[0] in names else None
    except Exception:  # whatever a class of the user's needs of the encoder that it has in the run
        return None
    return None
