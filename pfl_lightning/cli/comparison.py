"""Comparison of finished runs: means and spreads over seeds."""

from __future__ import annotations

import csv
import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pfl_lightning.callbacks.run_facts import FORMAT
from pfl_lightning.cli.runs import RunFolder
from pfl_lightning.errors import ConfigurationError

__all__ = ["Comparison", "FinishedRun", "compare_runs", "find_runs", "read_run"]

SETTINGS = ("model.method", "model.encoder", "data", "loop", "personalize", "trainer.max_epochs", "trainer.precision")
"""Settings that runs of one configuration share; their seeds may differ."""

NOT_SETTINGS = ("seed", "root")
"""Options below these that make no difference to what is compared."""


@dataclass(frozen=True)
class FinishedRun:
    """Results of a run, read from its folder.

    Attributes:
        path: The folder.
        method: Name of the method's class.
        settings: What tells its configuration from others, apart from the seeds.
        seeds: Its seeds.
        rounds: Communication rounds.
        num_clients: Number of clients, novel ones included.
        mean: Mean test accuracy over clients in the chosen round, in [0, 1]; NaN where there is none.
        std: Standard deviation over clients.
        worst_decile: Mean of the worst tenth of the clients.
        bytes_up: Bytes that all clients uploaded.
        bytes_down: Bytes that the server sent.
        seconds_per_round: Wall time of a round without its evaluation; NaN where unknown.
        personalized: Mean test accuracy after the personalization stage, NaN where there was none.
        personalized_novel: The same of clients that never trained.
        curve: (round, mean test accuracy) of every evaluated round.
        clients: Test accuracies of the clients in the chosen round.
    """

    path: Path
    method: str
    settings: str
    seeds: tuple[int, ...]
    rounds: int
    num_clients: int
    mean: float
    std: float
    worst_decile: float
    bytes_up: int
    bytes_down: int
    seconds_per_round: float
    personalized: float
    personalized_novel: float
    curve: tuple[tuple[int, float], ...]
    clients: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """Runs of one configuration that differ in their seeds only.

    Attributes:
        label: What the table and the picture call it.
        runs: One for each seed.
    """

    label: str
    runs: tuple[FinishedRun, ...]

    def over_seeds(self, attribute: str) -> tuple[float, float]:
        """Mean over seeds of a figure, and its standard deviation (of a sample); NaN where a seed has none."""
        values = np.array([float(getattr(run, attribute)) for run in self.runs])
        return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else math.nan

    def curve(self) -> list[tuple[int, float, float]]:
        """Round, mean and standard deviation over seeds, of the rounds that every seed has evaluated."""
        curves = [dict(run.curve) for run in self.runs]
        common = sorted(set.intersection(*(set(curve) for curve in curves)))
        found = []
        for round in common:
            values = np.array([curve[round] for curve in curves])
            found.append((round, float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0))
        return found


def find_runs(path: Path) -> list[Path]:
    """The finished runs of a folder: itself, or those of its versions that have results, oldest first.

    Raises:
        ConfigurationError: There is none.
    """
    if (path / "results.json").is_file():
        return [path]
    found = [version for version in RunFolder(path).versions() if (version / "results.json").is_file()]
    if not found:
        there = "there is no such folder" if not path.is_dir() else "the folder has neither that nor versions with it"
        raise ConfigurationError(
            f"no results.json in {path} or {path}/version_*: {there}; `pfl fit` writes it when a run ends, and a "
            "ResultsWriter does among a Trainer's callbacks"
        )
    return found


def read_run(folder: Path, choice: str = "last") -> FinishedRun:
    """Read a run's results.

    Args:
        folder: The run's folder.
        choice: ``"last"``, ``"validation_selected"`` or ``"best_test"``: which round's accuracies are taken.

    Raises:
        ConfigurationError: The results cannot be read, or are not those of this package.
    """
    path = folder / "results.json"
    try:
        results = json.loads(path.read_text())
        if "accuracy" in results and results.get("format", 1) != FORMAT:
            raise ConfigurationError(
                f"{path} has format {results.get('format', 1)}, expected {FORMAT}: it is of another version of this "
                "package; `pfl fit --ckpt_path .../last.ckpt` with the run's config writes it again, without training"
            )
        if not results.get("finished", True):
            warnings.warn(f"{folder} is not finished: it has {results['rounds']} rounds", stacklevel=2)
        chosen = (results["accuracy"][choice] or {}).get("test") or {}
        config = _config(folder)
        personalized = _personalized(folder)
        return FinishedRun(
            path=folder,
            method=str(results["method"]),
            settings=json.dumps([results["method"], results["rounds"], results["num_clients"], _settings(config)]),
            seeds=(int(results["seed"]), *_seeds(config)),
            rounds=int(results["rounds"]),
            num_clients=int(results["num_clients"]),
            mean=float(chosen.get("mean", math.nan)),
            std=float(chosen.get("std", math.nan)),
            worst_decile=float(chosen.get("worst_decile", math.nan)),
            bytes_up=int(results["bytes"]["up"]),
            bytes_down=int(results["bytes"]["down"]),
            seconds_per_round=float(results["seconds_per_round"] or math.nan),
            personalized=_mean(personalized, "participating"),
            personalized_novel=_mean(personalized, "novel"),
            curve=tuple((int(r["round"]), r["test"]["accuracy"]) for r in results["history"] if r["test"]),
            clients=tuple(_client_accuracies(folder / "clients.csv", choice)),
        )
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{path} is not what a run of this package leaves ({type(error).__name__}: {error}); leave the run out, or "
            "run it again"
        ) from error


def compare_runs(runs: Iterable[FinishedRun], labels: Sequence[str] | None = None) -> list[Comparison]:
    """Group runs that differ in their seeds only.

    Of two runs with equal seeds the later one counts. Configurations are called by their method; by their folders,
    too, where a method has several.

    Args:
        runs: Finished runs.
        labels: Names of the configurations, in the order in which they first appear.

    Raises:
        ConfigurationError: There are more or fewer labels than configurations.
    """
    groups: dict[str, dict[tuple[int, ...], FinishedRun]] = {}
    for run in runs:
        groups.setdefault(run.settings, {})[run.seeds] = run
    found = [tuple(group.values()) for group in groups.values()]
    if labels is not None and len(labels) != len(found):
        have = ", ".join(name for name in _labels(found))
        raise ConfigurationError(f"--labels has {len(labels)} names for {len(found)} configurations: {have}")
    return [Comparison(label, group) for label, group in zip(labels or _labels(found), found, strict=True)]


def _labels(groups: Sequence[tuple[FinishedRun, ...]]) -> list[str]:
    methods = [group[0].method for group in groups]
    labels = []
    for method, group in zip(methods, groups, strict=True):
        path = group[0].path
        folder = path.parent.name if path.name.startswith("version_") else path.name
        labels.append(method if methods.count(method) == 1 else f"{method} ({folder})")
    return [  # the version, too, where a folder has several configurations
        label if labels.count(label) == 1 else f"{label[:-1]}/{group[0].path.name})"
        for label, group in zip(labels, groups, strict=True)
    ]


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.yaml"
    found = yaml.safe_load(path.read_text()) if path.is_file() else None
    return found if isinstance(found, dict) else {}


def _settings(config: Mapping[str, Any]) -> list[Any]:
    found = []
    for name in SETTINGS:
        value: Any = config
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        found.append(_without_seeds(value))
    return found


def _without_seeds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_seeds(entry) for key, entry in sorted(value.items()) if key not in NOT_SETTINGS}
    return [_without_seeds(entry) for entry in value] if isinstance(value, list) else value


def _seeds(value: Any) -> list[int]:
    """Every seed of the configuration, in a fixed order."""
    if isinstance(value, list):
        return [seed for entry in value for seed in _seeds(entry)]
    if not isinstance(value, dict):
        return []
    found = []
    for key, entry in sorted(value.items()):
        found += [entry] if key == "seed" and isinstance(entry, int) else _seeds(entry)
    return found


def _personalized(folder: Path) -> Mapping[str, Any]:
    path = folder / "personalized.json"
    found: Mapping[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _mean(results: Mapping[str, Any], group: str) -> float:
    return float(results[group]["mean"]) if group in results else math.nan


def _client_accuracies(path: Path, choice: str) -> list[float]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        values = [row[f"test_accuracy_{choice}"] for row in csv.DictReader(file)]
    return [float(value) for value in values if value]
