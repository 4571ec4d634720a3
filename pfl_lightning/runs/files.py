"""Names of the files in a run's folder, and what they hold, or an error that names one that was cut or changed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from pfl_lightning.errors import ConfigurationError

CONFIG = "config.yaml"
"""The config that a run began with."""

CHANGES = "changes.json"
"""What resumptions have changed."""

RESULTS, CLIENTS = "results.json", "clients.csv"
"""The results of a training, and a row for each client."""

CURVES = "client_curves.csv"
"""Every client's accuracy and further metrics in every evaluation of a training."""

PERSONALIZED = "personalized.json"
"""The results of a personalization."""

TEST = "test.json"
EVALUATIONS = {TEST: "test_clients.csv", "validate.json": "validate_clients.csv", PERSONALIZED: "personalized.csv"}
"""Files of evaluations outside of a fit, and those of their clients."""

PARTITION = "partition.npz"
"""Which samples each client has."""

SLURM_JOB = "slurm_job.json"
"""Which of SLURM's jobs has begun the run."""


def last_checkpoint(run: Path) -> Path:
    """The checkpoint of a run's last round."""
    return run / "checkpoints" / "last.ckpt"


def newest_config(run: Path) -> Path:
    """The config that a run was resumed with last, or else that it began with."""
    return [run / CONFIG, *resumed_configs(run)][-1]


def resumed_configs(run: Path) -> list[Path]:
    """The configs that a run was resumed with, the first one first."""
    found: list[Path] = []
    while (path := run / f"config-resumed-{len(found) + 1}.yaml").is_file():
        found.append(path)
    return found


def read_config(path: Path, *, strict: bool = False) -> Mapping[str, Any]:
    """The options in a saved config; empty if there is none.

    Args:
        path: The file; one that is asked for again and again is read once.
        strict: Whether a file that is cut, or no YAML, is refused; otherwise it has no options.

    Raises:
        ConfigurationError: It is refused.
    """
    try:
        found, end = _parsed(path, path.stat().st_mtime_ns)
        if strict and end != "\n":
            raise ValueError("its end is missing" if end else "it is empty")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        if strict:
            raise damaged(path, error) from error
        return {}
    return found if isinstance(found, dict) else {}


@lru_cache(maxsize=1000)
def _parsed(path: Path, changed: int) -> tuple[Any, str]:
    """What a file holds, and its last character."""
    text = path.read_text()
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), text[-1:]


def read_json(path: Path) -> Any:
    """The content of a file in JSON.

    Raises:
        ConfigurationError: It is cut, or no JSON.
    """
    try:
        return json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, why: object) -> ConfigurationError:
    """What is told of a file that no run of this package leaves so.

    Args:
        path: The file.
        why: An error, or what is wrong in words.
    """
    reason = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
    return ConfigurationError(
        f"{path} is not a valid file of a run ({reason}); leave the run out, repair the file, "
        "or remove it (its content is then missing)"
    )


def set_later_aside(folder: Path, rounds: int) -> list[Path]:
    """Rename evaluations of rounds that a fit runs once more: their models are no longer those of the run.

    Args:
        folder: The run's folder.
        rounds: How many rounds the run has when the fit begins.

    Returns:
        The files, by their new names.
    """
    return [rename_aside(folder / name) for name in EVALUATIONS if _round_of(folder / name) > rounds]


def _round_of(path: Path) -> int:
    """The round of which an evaluation is; 0 where that is not known, or there is none."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        content = json.loads(path.read_text())
        return int(content["round"] if "round" in content else content["accuracy"]["last"]["round"])
    return 0


def rename_aside(path: Path) -> Path:
    """Rename an evaluation's file and that of its clients, ``NAME.json`` to ``NAME-1.json``, or the next free number.

    Args:
        path: The first of them.

    Returns:
        Its new name.
    """
    rows = path.with_name(EVALUATIONS[path.name])
    number = next(n for n in itertools.count(1) if not path.with_stem(f"{path.stem}-{n}").exists())
    with suppress(FileNotFoundError):
        rows.rename(rows.with_stem(f"{rows.stem}-{number}"))
    return path.rename(path.with_stem(f"{path.stem}-{number}"))
