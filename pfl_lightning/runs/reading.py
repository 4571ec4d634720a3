"""Reads the results of finished runs from their folders."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pfl_lightning.checks import check_choice
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.names import did_you_mean
from pfl_lightning.runs.changes import resumed_rounds, resumed_with
from pfl_lightning.runs.config import find_seeds, flatten, option_of, run_options
from pfl_lightning.runs.files import (
    CLIENTS,
    CONFIG,
    EVALUATIONS,
    PERSONALIZED,
    RESULTS,
    TEST,
    damaged,
    read_config,
    read_json,
)
from pfl_lightning.runs.folder import study_place
from pfl_lightning.runs.results import (
    CHOICES,
    FORMAT,
    Evaluation,
    FinishedRun,
    HistoryEntry,
    Source,
    client_accuracies,
    number_of,
)

SKIPPED_FOLDERS = ("search", "probe", "replaced")
"""Folders of a study, beside its runs, that no table is made of."""


def find_runs(path: Path) -> list[Path]:
    """The runs with results in a folder: itself, or those anywhere below (its versions, a study's runs).

    Args:
        path: Folder of a run, of its versions, or of a study.

    Raises:
        ConfigurationError: There is none.
    """
    found = {file.parent for name in (RESULTS, PERSONALIZED) for file in path.rglob(name)}
    runs = [folder for folder in found if found.isdisjoint(folder.parents) and not _is_aside(folder, path)]
    if not runs:
        there = "there is no such folder" if not path.is_dir() else "the folder has neither it nor versions with it"
        raise ConfigurationError(
            f"no results.json in {path} or {path}/version_*: {there}; `pfl fit` writes it when a run ends, as does "
            "a ResultsWriter among a Trainer's callbacks"
        )
    numbers = {folder: folder.name.removeprefix("version_") for folder in runs}
    number = {folder: int(text) if text.isdigit() else -1 for folder, text in numbers.items()}
    return sorted(runs, key=lambda folder: (folder.parent, number[folder], folder.name))


def _is_aside(folder: Path, top: Path) -> bool:
    """Whether a folder below another one is no run of a table: set aside, or a study's trial, probe or older run."""
    while folder != top:
        if folder.name.startswith("set_aside_"):
            return True
        if folder.name in SKIPPED_FOLDERS and (folder.parent / "runs").is_dir():
            return True
        if folder.name.startswith("trials_") and (folder.parent / "journal.log").is_file():
            return True
        folder = folder.parent
    return False


def read_run(folder: Path, choice: str = "last", metric: str = "accuracy") -> FinishedRun:
    """Read a run's results.

    Args:
        folder: The run's folder.
        choice: ``"last"``, ``"validation_selected"`` or ``"best_test"``: which round's accuracies are taken.
        metric: The metric that stands in the place of accuracy.

    Raises:
        ConfigurationError: The results cannot be read, lack the metric, or are not those of this package.
    """
    check_choice("choice", choice, CHOICES)
    path = folder / RESULTS
    trained = path.is_file() or not (folder / PERSONALIZED).is_file()
    path = path if trained else folder / PERSONALIZED
    try:
        content = read_json(path)
        # The first form had no number, nor has a personalization.
        format = int(content.get("format", 1 if "accuracy" in content else FORMAT))
        if format != FORMAT:
            raise ConfigurationError(
                f"{path} has format {format}, this version of pfl_lightning reads format {FORMAT}: "
                "pfl-lightning==0.3.0 reads format 1, a later version later ones"
            )
        content = _of_metric(path, content, metric)
        if trained:
            found = _trained(folder, content, choice, metric)
        else:  # clients were personalized from a model that was not trained
            number = sum(int(content[name]["num_clients"]) for name in ("participating", "novel") if name in content)
            found = {
                "rounds": int(content.get("round") or 0),
                "num_clients": number,
                **_personalized(folder, None, metric),
            }
        named: dict[str, Any] = {"metric": metric, "lower_is_better": bool(content.get("lower_is_better"))}
        run = FinishedRun(path=folder, place=study_place(folder), **_facts(folder, content), **found, **named)
    except ConfigurationError:
        raise
    except (ValueError, yaml.YAMLError, LookupError, TypeError, AttributeError, OSError) as error:
        raise damaged(path, error) from error
    if not run.finished:
        warnings.warn(f"{folder} is not finished: it has {run.rounds} rounds", stacklevel=2)
    return run


def _of_metric(path: Path, content: dict[str, Any], metric: str) -> dict[str, Any]:
    """The content of a file of results with a metric in the place of accuracy."""
    if metric == "accuracy":
        return content
    measured = content.get("metrics") or {}
    if metric not in measured:
        raise ConfigurationError(
            f"{path} has no metric {metric!r}{did_you_mean(metric, measured)}: it has accuracy"
            + "".join(f", {name}" for name in measured)
            + f". Give --metrics {metric} to the training"
        )
    entry = dict(measured[metric])
    lower = entry.pop("lower_is_better")
    groups = ("participating", "never_trained", "novel")  # of a personalization, which has no rounds
    rest = {name: value for name, value in content.items() if name not in groups}
    return {**rest, "lower_is_better": lower, **(entry if "accuracy" not in content else {"accuracy": entry})}


def _facts(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies a run: method, data and seeds; its options, with what a resumption has changed of them."""
    config, method = read_config(folder / CONFIG, strict=True), str(content["method"])
    trained = "rounds" in content  # resumptions are of trainings
    planned = _planned_rounds(config, content, resumed_rounds(folder)) if trained else int(content.get("round") or 0)
    options = run_options(config, method, content.get("method_arguments") or {}, planned)
    if attack := content.get("attack"):  # accuracies are those of honest clients; who lies may follow the seed
        options |= {"attack": attack["kind"], "attack.scale": attack["scale"], "attack.liars": len(attack["liars"])}
    return {
        "method": method,
        "data": _source(content.get("data")),
        "partition": _source(content.get("partition")),
        "config": config,
        "options": options | (resumed_with(folder) if trained else {}),
        "seed": int(content["seed"]),
        "data_seeds": tuple(find_seeds(config.get("data"))),
        "seeds": (int(content["seed"]), *find_seeds(config)),
    }


def _planned_rounds(config: Mapping[str, Any], results: Mapping[str, Any], resumed: int | None) -> int:
    """The rounds that a finished run was to have, of its last resumption; it may have been ended early."""
    done = int(results["rounds"])
    planned = option_of(config, "trainer.max_epochs") if resumed is None else resumed
    if not results.get("finished", True) or not isinstance(planned, int) or isinstance(planned, bool):
        return done
    return max(planned, done)


def _source(content: Mapping[str, Any] | None) -> Source:
    return Source(**{name: str((content or {}).get(name) or "") for name in ("name", "fingerprint")})


def _trained(folder: Path, results: Mapping[str, Any], choice: str, metric: str) -> dict[str, Any]:
    """What a training has left, with evaluations and a personalization after it."""
    chosen = results["accuracy"][choice] or {}
    summary = chosen.get("test") or {}
    clients = client_accuracies(folder / CLIENTS, f"test_{metric}_{choice}", summary)
    test = _evaluation(results["evaluated"], summary, clients, chosen.get("round"))
    rounds, novel = results.get("rounds_trained") or [], set(results.get("novel_clients") or ())
    # After these a model may have been personalized: the last one, or what `best` may mean.
    evaluated = [one for one in map(results["accuracy"].get, CHOICES) if one and one.get("round") is not None]
    idle = [client for client, number in enumerate(rounds) if not number and client not in novel]
    return {
        "finished": bool(results.get("finished", True)),
        "rounds": int(results["rounds"]),
        "num_clients": int(results["num_clients"]),
        "never_trained": tuple(idle) if any(rounds) else (),  # a version may not have counted them
        "test": test if summary else _tested_afterwards(folder, chosen, choice, results, metric) or test,
        **_personalized(folder, {int(results["rounds"]), *(int(one["round"]) for one in evaluated)}, metric),
        "bytes_up": number_of(results["bytes"]["up"]),
        "bytes_down": number_of(results["bytes"]["down"]),
        "seconds_per_round": number_of(results["seconds_per_round"]),
        "history": tuple(HistoryEntry.from_dict(entry, metric) for entry in results["history"]),
        "versions": dict(results.get("versions") or {}),
    }


def _tested_afterwards(
    folder: Path, chosen: Mapping[str, Any], choice: str, results: Mapping[str, Any], metric: str
) -> Evaluation | None:
    """What ``trainer.test`` has found of the chosen round, where rounds do not evaluate test parts."""
    path = folder / TEST
    if choice == "best_test" or not path.is_file():
        return None
    content = _of_metric(path, read_json(path), metric)
    found = content["accuracy"]["last"] or {}
    wanted = results["rounds"] if choice == "last" and not chosen else chosen.get("round")  # where none was evaluated
    if not found.get("test") or found["round"] != wanted:
        return None
    clients = client_accuracies(folder / EVALUATIONS[TEST], f"test_{metric}", found["test"], "0")
    return _evaluation(content["evaluated"], found["test"], clients, found["round"])


def _evaluation(
    evaluated: Mapping[str, Any], summary: Mapping[str, Any], clients: Mapping[int, float], round: int | None
) -> Evaluation:
    score, model = str(evaluated.get("score") or "classifier"), str(evaluated.get("model") or "")
    figures = {name: number_of(summary.get(name)) for name in ("mean", "std", "worst_decile")}
    return Evaluation(score=score, model=model, **figures, clients=clients, round=round)


def _personalized(folder: Path, rounds: set[int] | None, metric: str) -> dict[str, Any]:
    path = folder / PERSONALIZED
    if not path.is_file():
        return {}
    content = _of_metric(path, read_json(path), metric)
    if rounds is not None and content.get("round") is not None and content["round"] not in rounds:
        warnings.warn(
            f"{folder}: its personalized accuracies are of round {content['round']}, and the run continued to round "
            f"{max(rounds)}: they are left out. pfl personalize --ckpt_path last evaluates the last round",
            stacklevel=2,
        )
        return {}
    evaluated = content.get("evaluated") or {"score": "classifier", "model": "fine_tuned"}
    found: dict[str, Any] = {"personalization": flatten("personalize", content.get("personalization") or {})}
    for name, group, novel in (("personalized", "participating", "0"), ("personalized_novel", "novel", "1")):
        if group in content:
            trained = novel == "0" and "never_trained" in content
            path = folder / EVALUATIONS[PERSONALIZED]
            clients = client_accuracies(path, f"test_{metric}", content[group], novel, trained)
            found[name] = _evaluation(evaluated, content[group], clients, content.get("round"))
    return found
