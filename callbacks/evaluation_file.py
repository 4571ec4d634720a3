"""What a test and a validation outside of a fit leave behind: the form of results.json, and a row for each client."""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import lightning as L

from pfl_lightning.callbacks.run_facts import counts, evaluated, run_facts
from pfl_lightning.federation import Federation
from pfl_lightning.federation.loop import RoundLoop
from pfl_lightning.runs.files import EVALUATIONS
from pfl_lightning.runs.results import accuracies, as_text, csv_text, summary_of

Part = Literal["test", "validation"]
"""Which of a client's parts were evaluated."""


def set_later_aside(folder: Path, rounds: int) -> list[Path]:
    """Rename evaluations of rounds that a fit plays once more: their models are no longer those of the run.

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
    return {f"{name}.json": text, f"{name}_clients.csv": _rows(federation, part)}


def _content(trainer: L.Trainer, federation: Federation, loop: RoundLoop | None, part: Part) -> dict[str, Any]:
    novel = set(federation.data.novel)
    found = {name: accuracies(scores) for name, scores in _scores(federation).items()}
    if loop is not None and not loop.rounds and federation.has_trained:
        loop = None  # another one has counted the rounds
    last: dict[str, Any] = {"round": federation.round + 1 if federation.has_trained else 0}
    for name, values in found.items():
        last[name] = summary_of({client: value for client, value in values.items() if client not in novel})
        if novel:
            last[f"novel_{name}"] = summary_of({client: value for client, value in values.items() if client in novel})
    checkpoint = trainer.ckpt_path
    return {
        **run_facts(federation),
        "finished": None,
        **counts(loop, federation, len(_scores(federation)[part])),
        "evaluated": evaluated(federation, has_accuracy=any(found.values())),
        "checkpoint": Path(checkpoint).name if checkpoint else None,
        "accuracy": {"last": last, "validation_selected": None, "best_test": None},
    }


def _scores(federation: Federation) -> dict[Part, Any]:
    return {"test": federation.test_scores, "validation": federation.validation_scores}


def _rows(federation: Federation, part: Part) -> str:
    """A row for each client, with what a user's module has logged."""
    scores, novel = _scores(federation)[part], set(federation.data.novel)
    logged = sorted({name for score in scores.values() for name in score.logged})
    names = ["client", "novel", "train_samples", "rounds_trained"]
    rows: list[list[Any]] = [[*names, f"{part}_samples", f"{part}_accuracy", f"{part}_loss", *logged]]
    for client, score in scores.items():
        samples, rounds = len(federation.data.client_data(client).train), federation.rounds_trained[client]
        figures = (score.num_samples, score.accuracy, score.loss, *(score.logged.get(name, "") for name in logged))
        rows.append([client, int(client in novel), samples, rounds, *figures])
    return csv_text(rows)
