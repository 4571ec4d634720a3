"""What files of results say: method, arguments, data, partition and versions of a run; evaluations outside of a fit."""

from __future__ import annotations

import inspect
import math
import platform
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch

from pfl_lightning.encoders.assignment import unwrapped
from pfl_lightning.federation import Federation
from pfl_lightning.federation.loop import RoundLoop
from pfl_lightning.names import parameters_of
from pfl_lightning.runs.results import FORMAT, as_text, csv_text, summary_of, values_by_metric, with_names

Part = Literal["test", "validation"]
"""Which of a client's parts were evaluated."""

NOT_ARGUMENTS = {"self", "encoder", "num_classes", "head", "factory", "frozen"}
"""Parameters of a client's class that are no hyper-parameters, or whose values are modules."""

OWN_TRAINING = {"lr", "momentum", "weight_decay", "optimizer", "lr_scheduler", "schedule"}
"""Arguments that say nothing of a client whose user's LightningModule makes its optimizers itself."""

DEPTH = 6
"""Levels of nested arguments that are written out."""


def run_facts(federation: Federation) -> dict[str, Any]:
    """What identifies a run, by the names of ``results.json``."""
    data: Any = federation.data
    rule = type(getattr(data, "partition", None))
    return {
        "format": FORMAT,
        "method": federation.method_name,
        "method_arguments": method_arguments(federation),
        "data": {"name": type(data).__name__, "fingerprint": _hash(getattr(data, "data_fingerprint", None))},
        "partition": {
            "name": None if rule is type(None) else rule.__name__.lstrip("_"),
            "fingerprint": _hash(federation.data.fingerprint),
        },
        "versions": versions(),
        "seed": federation.seed,
    }


def counts(loop: RoundLoop | None, federation: Federation, evaluated_clients: int) -> dict[str, Any]:
    """Rounds, clients, bytes and seconds of a run, by the names of ``results.json``.

    Args:
        loop: What has counted them; ``None`` where that is not known.
        federation: The federation.
        evaluated_clients: How many clients were evaluated.
    """
    up, down = loop.closed_traffic if loop is not None else ({}, {})
    rounds, seconds = (loop.rounds, loop.seconds) if loop is not None else (None, None)
    left_out = {} if loop is None else {str(client): rounds for client, rounds in sorted(loop.left_out.items())}
    return {
        "rounds": rounds,
        "num_clients": federation.num_clients,
        "novel_clients": list(federation.data.novel),
        "evaluated_clients": evaluated_clients,
        "rounds_trained": federation.rounds_trained,
        "bytes": {
            "up": None if loop is None else sum(up.values()),
            "down": None if loop is None else sum(down.values()),
            "up_by_kind": dict(up),
            "down_by_kind": dict(down),
        },
        "seconds": seconds,
        **({} if loop is None or loop.clock is None else {"simulated_seconds": loop.clock}),
        "seconds_per_round": seconds / rounds if rounds and seconds is not None else None,
        **({} if federation.mechanism is None else {"privacy": federation.mechanism.facts()}),
        **({} if federation.robust is None else {"left_out": left_out}),
    }


def evaluated(federation: Federation, *, has_accuracy: bool = True) -> dict[str, str]:
    """What kind of score an evaluation gives now, and of which model.

    Args:
        federation: The federation.
        has_accuracy: Whether the clients' scores had accuracies.
    """
    client: Any = federation.models[0]
    own = client.step_module is client  # and no user's LightningModule
    score = "classifier" if own or has_accuracy else "metric"
    model = "fine_tuned" if client.personalization_phases() else str(client.eval_model)
    return {"score": "nearest_neighbor" if client.uses_knn_evaluation() else score, "model": model}


def score_name(federation: Federation, part: str) -> str:
    """What people read above the scores of a part, such as ``"test accuracy"``.

    Args:
        federation: The federation.
        part: ``"test"`` or ``"validation"``.
    """
    client: Any = federation.models[0]
    return f"nearest-neighbor score ({part} parts)" if client.uses_knn_evaluation() else f"{part} accuracy"


def samples_of(federation: Federation, part: str) -> dict[int, int]:
    """Number of samples of a part, by client."""
    data = federation.data
    return {client: len(getattr(data.client_data(client), part)) for client in range(data.num_clients)}


def further_metrics(federation: Federation, of: Callable[[str, bool], Mapping[str, Any]]) -> dict[str, Any]:
    """The entry ``metrics`` of a file of results; none without further metrics.

    Args:
        federation: The federation.
        of: What is known of a metric, by its name and whether lower values are better.
    """
    known = federation.class_metrics.items()
    found = {n: {"lower_is_better": one.lower_is_better, **of(n, one.lower_is_better)} for n, one in known}
    return {"metrics": found} if found else {}


def confusion_file(federation: Federation, prefix: str = "") -> dict[str, str]:
    """Content of the file of confusion matrices of the last evaluation, by its name; none where nothing asks for them.

    Args:
        federation: The federation.
        prefix: First part of the file's name.
    """
    data: Any = federation.data
    names = data.class_names or range(data.num_classes)
    rows: list[list[Any]] = [["client", "part", "class", "predicted", "samples"]]
    for part, scores in (("test", federation.test_scores), ("validation", federation.validation_scores)):
        for client, score in scores.items():
            for own, line in zip(names, score.confusion, strict=False):
                rows += [[client, part, own, given, n] for given, n in zip(names, line, strict=True) if n]
    return {f"{prefix}confusion_matrices.csv": csv_text(rows)} if len(rows) > 1 else {}


def versions() -> dict[str, str]:
    """Versions of the packages that the figures depend on."""
    from pfl_lightning import __version__

    found = {"pfl_lightning": __version__, "torch": torch.__version__, "lightning": L.__version__}
    return {**found, "numpy": np.__version__, "python": platform.python_version()}


def evaluation_files(trainer: L.Trainer, federation: Federation, loop: RoundLoop | None, part: Part) -> dict[str, str]:
    """Content of ``test.json`` and ``test_clients.csv``, or of those of a validation, by name.

    Args:
        trainer: The Trainer of the evaluation.
        federation: The federation, which has been evaluated.
        loop: What has counted the rounds of the training; ``None`` where that is not known.
        part: Which parts were evaluated.
    """
    name = {"test": "test", "validation": "validate"}[part]
    text = as_text(_content(trainer, federation, loop, part))
    found = confusion_file(federation, f"{name}_")
    return {f"{name}.json": text, f"{name}_clients.csv": client_rows(federation, part), **found}


def _content(trainer: L.Trainer, federation: Federation, loop: RoundLoop | None, part: Part) -> dict[str, Any]:
    novel = set(federation.data.novel)
    scores = {"test": federation.test_scores, "validation": federation.validation_scores}
    found = {name: values_by_metric(one) for name, one in scores.items()}
    samples = {name: {client: score.num_samples for client, score in one.items()} for name, one in scores.items()}
    if loop is not None and not loop.rounds and federation.has_trained:
        loop = None  # another one has counted the rounds

    def choices(metric: str = "accuracy", lower_is_better: bool = False) -> dict[str, Any]:
        last: dict[str, Any] = {"round": federation.round + 1 if federation.has_trained else 0}
        for name, values in found.items():
            own = values.get(metric, {})
            for key, group in ((name, own.keys() - novel), (f"novel_{name}", own.keys() & novel))[: 1 + bool(novel)]:
                last[key] = summary_of({c: own[c] for c in sorted(group)}, samples[name], lower_is_better)
        return {"last": last, "validation_selected": None, "best_test": None}

    checkpoint = trainer.ckpt_path
    return {
        **run_facts(federation),
        "finished": None,
        **counts(loop, federation, len(scores[part])),
        "evaluated": evaluated(federation, has_accuracy=any(values["accuracy"] for values in found.values())),
        "checkpoint": Path(checkpoint).name if checkpoint else None,
        "accuracy": choices(),
        **further_metrics(federation, choices),
    }


def client_rows(federation: Federation, part: Part, personalized: Collection[int] | None = None) -> str:
    """A row of a CSV file for each client, with what a user's module has logged.

    Args:
        federation: The federation, which has been evaluated.
        part: Which parts were evaluated.
        personalized: Clients that have adapted their models, which has a column of its own, in the place of what was
            logged; ``None`` for no personalization.
    """
    scores = federation.test_scores if part == "test" else federation.validation_scores
    novel, metrics = set(federation.data.novel), [*federation.class_metrics]
    adapted = [] if personalized is None else ["personalized"]
    columns = [f"{part}_{name}" for name in ("samples", "accuracy", "loss", *metrics)]
    of_module = {client: score.logged if personalized is None else {} for client, score in scores.items()}
    logged = sorted({name for own in of_module.values() for name in own if name not in columns})
    rows: list[list[Any]] = [["client", "novel", *adapted, "train_samples", "rounds_trained", *columns, *logged]]
    for client, score in scores.items():
        known = [int(client in novel), *(int(client in (personalized or ())) for _ in adapted)]
        samples, rounds = len(federation.data.client_data(client).train), federation.rounds_trained[client]
        figures = (score.num_samples, score.accuracy, score.loss, *(score.further.get(name, "") for name in metrics))
        values: dict[str, Any] = {
            **dict(zip(columns, figures, strict=True)),
            **of_module[client],
        }  # of equal names the module's own
        rows.append([client, *known, samples, rounds, *(values.get(name, "") for name in (*columns, *logged))])
    return csv_text(with_names(rows, federation.data))


def method_arguments(federation: Federation) -> dict[str, Any]:
    """The clients' hyper-parameters, defaults included, a server's optimizer, and privacy, in a form that JSON has.

    Functions and classes are called by their names, partials by theirs with their arguments, other objects by their
    class.
    """
    client: Any = federation.models[0]
    _, given = unwrapped(federation.method_factory)
    unused = set() if client.step_module is client else OWN_TRAINING - given.keys()
    found: dict[str, Any] = {}
    for name, default in sorted(constructor_parameters(type(client)).items()):
        if name not in unused:  # None may stand for what the method has by itself, which the client then knows
            own = vars(client).get(name, None if name in given else default)
            found[name] = as_json(own if given.get(name) is None else given[name])
    if federation.server_optimizer is not None:
        found["server_optimizer"] = as_json(federation.server_optimizer)
    if federation.privacy is not None:
        found["privacy"] = as_json(federation.privacy)
    if federation.robust is not None:
        found["robust"] = repr(federation.robust)
    return found


def constructor_parameters(made: type) -> dict[str, Any]:
    """Parameters of a class and, where it passes options on, of its bases, with their defaults."""
    found = ((name, p.default) for name, (p, _) in parameters_of(made).items() if name not in NOT_ARGUMENTS)
    return {name: None if default is inspect.Parameter.empty else default for name, default in found}


def as_json(value: Any, depth: int = DEPTH) -> Any:
    """A value in a form that JSON has; numbers that are not finite become words."""
    if value is None or isinstance(value, bool | int | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth == 0:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(key): as_json(entry, depth - 1) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        entries = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [as_json(entry, depth - 1) for entry in entries]
    if isinstance(value, partial):
        return {"name": as_json(value.func), "arguments": as_json(value.keywords, depth - 1)}
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value), depth - 1)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        return as_json(value.item())
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else type(value).__name__


def _hash(found: str | None) -> str | None:
    return None if found is None else f"sha256:{found}"
