"""Reads the results of finished runs from their folders."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.runs.changes import resumed_rounds, resumed_with
from pfl_lightning.runs.config import find_seeds, flatten, run_options
from pfl_lightning.runs.files import CLIENTS, PERSONALIZED, RESULTS, damaged, first_config, read_config, read_json
from pfl_lightning.runs.folder import study_place
from pfl_lightning.runs.results import CHOICES, Evaluation, FinishedRun, HistoryEntry, Source, client_accuracies

__all__ = ["find_runs", "read_run"]

ASIDE = ("search", "probe", "replaced")
"""Folders of a study, beside its runs, that no table is made of."""

NEWEST = 2
"""The newest form of results.json that is read here."""

SHOWN = 3
"""Folders that a sentence names."""


def find_runs(path: Path) -> list[Path]:
    """The runs with results in a folder: itself, its versions, or those anywhere below (a study's folder).

    Args:
        path: Folder of a run, of its versions, or of a study.

    Raises:
        ConfigurationError: There is none.
    """
    if _has_results(path):
        return [path]
    below = {file.parent for name in (RESULTS, PERSONALIZED) for file in path.rglob(name)}
    below = {folder for folder in below if not _is_aside(folder, path)}
    found = sorted((version for version in below if _is_version(version, path)), key=_order)
    if not found:
        found = sorted(below, key=lambda folder: (folder.parent, _order(folder)))
    elif others := {folder.parent for folder in below if not any(_is_within(folder, version) for version in found)}:
        warnings.warn(
            f"{path} has versions of its own, which are shown; runs in folders below it are not: name these, too "
            f"({', '.join(map(str, sorted(others)[:SHOWN]))}{', ...' if len(others) > SHOWN else ''})",
            stacklevel=2,
        )
    if not found:
        there = "there is no such folder" if not path.is_dir() else "the folder has neither that nor versions with it"
        raise ConfigurationError(
            f"no results.json in {path} or {path}/version_*: {there}; `pfl fit` writes it when a run ends, and a "
            "ResultsWriter does among a Trainer's callbacks"
        )
    return found


def _is_version(folder: Path, of: Path) -> bool:
    return folder.parent == of and folder.name.startswith("version_")


def _is_within(folder: Path, other: Path) -> bool:
    return folder == other or other in folder.parents


def _is_aside(folder: Path, top: Path) -> bool:
    """Whether a folder below another one is no run of a table: set aside, or a study's trial, probe or older run."""
    while folder != top:
        if folder.name.startswith("set_aside_"):
            return True
        if folder.name in ASIDE and (folder.parent / "runs").is_dir():
            return True
        if folder.name.startswith("trials_") and (folder.parent / "journal.log").is_file():
            return True
        folder = folder.parent
    return False


def _has_results(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (RESULTS, PERSONALIZED))


def _order(folder: Path) -> tuple[int, str]:
    number = folder.name.removeprefix("version_")
    return (int(number) if number.isdigit() else -1), folder.name


def read_run(folder: Path, choice: str = "last") -> FinishedRun:
    """Read a run's results.

    Args:
        folder: The run's folder.
        choice: ``"last"``, ``"validation_selected"`` or ``"best_test"``: which round's accuracies are taken.

    Raises:
        ConfigurationError: The results cannot be read, or are not those of this package.
    """
    if choice not in CHOICES:
        raise ConfigurationError(f"choice must be one of {', '.join(CHOICES)}, got {choice!r}")
    path = folder / RESULTS
    if not path.is_file() and (folder / PERSONALIZED).is_file():
        path = folder / PERSONALIZED
    try:
        content = read_json(path)
        if int(content.get("format", 1)) > NEWEST:
            raise ConfigurationError(
                f"{path} has format {content['format']}, this version of pfl_lightning reads up to {NEWEST}: update it"
            )
        run = _personalized_only(folder, content) if path.name != RESULTS else _trained(folder, content, choice)
    except ConfigurationError:
        raise
    except (ValueError, yaml.YAMLError, LookupError, TypeError, AttributeError, OSError) as error:
        raise damaged(path, error) from error
    if not run.finished:
        warnings.warn(f"{folder} is not finished: it has {run.rounds} rounds", stacklevel=2)
    return run


def _trained(folder: Path, results: Mapping[str, Any], choice: str) -> FinishedRun:
    old = int(results.get("format", 1)) == 1
    config = read_config(first_config(folder), strict=True)
    chosen = results["accuracy"][choice] or {}
    evaluated = _guess_evaluated(config, results) if old else results["evaluated"]
    summary = chosen if old else chosen.get("test") or {}
    clients = client_accuracies(folder / CLIENTS, f"test_accuracy_{choice}", summary)
    round = None if old else chosen.get("round")  # counted from 0 in the older form
    test = _evaluation(evaluated, summary, clients, round)
    return FinishedRun(
        path=folder,
        method=str(results["method"]),
        finished=bool(results.get("finished", True)),
        data=_source(results.get("data"), config.get("data")),
        partition=_source(results.get("partition"), _init_args(config.get("data")).get("partition")),
        **_configured(config, results, resumed_rounds(folder), resumed_with(folder)),
        place=study_place(folder),
        seed=int(results["seed"]),
        rounds=int(results["rounds"]),
        num_clients=int(results["num_clients"]),
        never_trained=_never_trained(results),
        test=test if old or chosen.get("test") else _tested_afterwards(folder, chosen, choice, results) or test,
        **_personalized(folder, _rounds_of(results)),
        bytes_up=_number(results["bytes"]["up"]),
        bytes_down=_number(results["bytes"]["down"]),
        seconds_per_round=_number(results["seconds_per_round"]),
        history=tuple((_old_entry if old else _entry)(entry) for entry in results["history"]),
        versions=dict(results.get("versions") or {}),
    )


def _never_trained(results: Mapping[str, Any]) -> tuple[int, ...]:
    """Clients without a round; none where nothing was trained, or a version that did not count them wrote the file."""
    rounds, novel = results.get("rounds_trained") or [], set(results.get("novel_clients") or ())
    return tuple(c for c, number in enumerate(rounds) if not number and c not in novel) if any(rounds) else ()


def _tested_afterwards(
    folder: Path, chosen: Mapping[str, Any], choice: str, results: Mapping[str, Any]
) -> Evaluation | None:
    """What ``trainer.test`` has found of the chosen round, where rounds do not evaluate test parts."""
    path = folder / "test.json"
    if choice == "best_test" or not path.is_file():
        return None
    content = read_json(path, "it")
    found = content["accuracy"]["last"] or {}
    wanted = results["rounds"] if choice == "last" and not chosen else chosen.get("round")  # where none was evaluated
    if not found.get("test") or found["round"] != wanted:
        return None
    clients = client_accuracies(folder / "test_clients.csv", "test_accuracy", found["test"], "0")
    return _evaluation(content["evaluated"], found["test"], clients, found["round"])


def _personalized_only(folder: Path, content: Mapping[str, Any]) -> FinishedRun:
    """A run whose clients were personalized from a model that was not trained."""
    config = read_config(first_config(folder), strict=True)
    groups = [content[name] for name in ("participating", "novel") if name in content]
    rounds = int(content.get("round") or 0)
    found = {"method": content["method"], "seed": content["seed"], "rounds": rounds}
    return FinishedRun(
        path=folder,
        method=str(content["method"]),
        data=_source(content.get("data"), config.get("data")),
        partition=_source(content.get("partition"), _init_args(config.get("data")).get("partition")),
        **_configured(config, found),
        place=study_place(folder),
        seed=int(content["seed"]),
        rounds=rounds,
        num_clients=sum(int(group["num_clients"]) for group in groups),
        **_personalized(folder),
    )


def _configured(
    config: Mapping[str, Any],
    results: Mapping[str, Any],
    rounds: int | None = None,
    resumed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the config says: options, with what a resumption has changed of them, its rounds as well, and seeds."""
    method, arguments = str(results["method"]), results.get("method_arguments") or {}
    planned = _planned_rounds(config, results, rounds)
    return {
        "config": config,
        "options": run_options(config, method, arguments, planned) | dict(resumed or {}),
        "data_seeds": tuple(find_seeds(config.get("data"))),
        "seeds": (int(results["seed"]), *find_seeds(config)),
    }


def _planned_rounds(config: Mapping[str, Any], results: Mapping[str, Any], resumed: int | None) -> int:
    """The rounds that a finished run was to have, of its last resumption; it may have been ended early."""
    played, trainer = int(results["rounds"]), config.get("trainer")
    planned = trainer.get("max_epochs") if isinstance(trainer, Mapping) else None
    planned = planned if resumed is None else resumed
    if not results.get("finished", True) or not isinstance(planned, int) or isinstance(planned, bool):
        return played
    return max(planned, played)


def _init_args(value: Any) -> Mapping[str, Any]:
    found = value.get("init_args") if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _source(said: Mapping[str, Any] | None, configured: Any) -> Source:
    """What the results say of data or partition; in the older form, what the config does."""
    if said:
        return Source(str(said.get("name") or ""), str(said.get("fingerprint") or ""))
    named = configured.get("class_path") if isinstance(configured, Mapping) else None
    return Source(str(named or "").rpartition(".")[2])


def _guess_evaluated(config: Mapping[str, Any], results: Mapping[str, Any]) -> Mapping[str, str]:
    """In the older form: self-supervised methods, which alone have an objective, were scored by nearest neighbors."""
    model = config.get("model")
    arguments = _init_args(model.get("method") if isinstance(model, Mapping) else None)
    neighbors = "objective" in arguments or results["method"] in ("Calibre", "FedEMA", "PFLSSL")
    return {"score": "nearest_neighbor" if neighbors else "classifier"}


def _evaluation(
    evaluated: Mapping[str, Any], summary: Mapping[str, Any], clients: Mapping[int, float], round: int | None
) -> Evaluation:
    return Evaluation(
        score=str(evaluated.get("score") or "classifier"),
        model=str(evaluated.get("model") or ""),
        mean=_number(summary.get("mean")),
        std=_number(summary.get("std")),
        worst_decile=_number(summary.get("worst_decile")),
        clients=clients,
        round=round,
    )


def _rounds_of(results: Mapping[str, Any]) -> set[int]:
    """Rounds whose model may have been personalized: the last one, and those that ``best`` may mean."""
    chosen = (results["accuracy"].get(choice) or {} for choice in CHOICES)
    return {int(results["rounds"]), *(int(one["round"]) for one in chosen if one.get("round") is not None)}


def _personalized(folder: Path, rounds: set[int] | None = None) -> dict[str, Any]:
    path = folder / PERSONALIZED
    if not path.is_file():
        return {}
    content = read_json(path, "its personalization")
    if rounds is not None and content.get("round") is not None and content["round"] not in rounds:
        warnings.warn(
            f"{folder}: its personalized accuracies are of round {content['round']}, after which the run went on to "
            f"round {max(rounds)}: they are left out. pfl personalize --ckpt_path last evaluates the last round",
            stacklevel=2,
        )
        return {}
    evaluated = content.get("evaluated") or {"score": "classifier", "model": "fine_tuned"}
    found: dict[str, Any] = {"personalization": flatten("personalize", content.get("personalization") or {})}
    for name, group, novel in (("personalized", "participating", "0"), ("personalized_novel", "novel", "1")):
        if group in content:
            trained = novel == "0" and "never_trained" in content
            path = folder / "personalized.csv"
            clients = client_accuracies(path, "test_accuracy", content[group], novel, trained)
            found[name] = _evaluation(evaluated, content[group], clients, content.get("round"))
    return found


def _entry(entry: Mapping[str, Any]) -> HistoryEntry:
    return HistoryEntry(
        round=int(entry["round"]),
        test=_number((entry.get("test") or {}).get("accuracy")),
        validation=_number((entry.get("validation") or {}).get("accuracy")),
        bytes_up=_number(entry.get("bytes_up")),
        bytes_down=_number(entry.get("bytes_down")),
        seconds=_number(entry.get("seconds")),
    )


def _old_entry(entry: Mapping[str, Any]) -> HistoryEntry:
    """Its rounds counted from 0."""
    test, validation = _number(entry.get("test_accuracy")), _number(entry.get("accuracy"))
    return HistoryEntry(round=int(entry["round"]) + 1, test=test, validation=validation)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
