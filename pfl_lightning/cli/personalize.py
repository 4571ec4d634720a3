"""Results of evaluations: the clients' accuracies, and those after they adapted the trained model."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from pfl_lightning.callbacks.evaluation_file import Part, rename_aside
from pfl_lightning.callbacks.run_facts import evaluated, run_facts, score_name
from pfl_lightning.federation import Federation
from pfl_lightning.metrics import AccuracySummary, EvalMetrics, summarize
from pfl_lightning.phases import Personalization
from pfl_lightning.runs.files import EVALUATIONS, PERSONALIZED
from pfl_lightning.runs.results import as_text
from pfl_lightning.state.files import replace_file

__all__ = ["evaluation_table", "personalization_table", "write_personalization"]

WHAT = {
    "linear": "a linear head",
    "linear+encoder": "a linear head and the encoder",
    "head": "the head",
    "all": "the whole model",
    "nothing": "nothing",
}
"""What is trained, by the value of ``train``."""

ADAPTED = {"score": "classifier", "model": "fine_tuned"}
"""What an evaluation gives after clients have adapted something."""


def _summaries(federation: Federation, part: Part = "test") -> dict[str, tuple[int, AccuracySummary]]:
    """Number of clients and summary of those that trained, of those that could have and did not, and of novel ones."""
    novel, idle = set(federation.data.novel), set(federation.never_trained)
    scores = federation.test_scores if part == "test" else federation.validation_scores
    groups: dict[str, Mapping[int, EvalMetrics]] = {
        "participating": {c: s for c, s in scores.items() if c not in novel | idle},
        "never_trained": {c: s for c, s in scores.items() if c in idle},
        "novel": {c: s for c, s in scores.items() if c in novel},
    }
    return {
        name: (len(scores), summarize(list(scores), [score.accuracy for score in scores.values()]))
        for name, scores in groups.items()
        if scores
    }


def personalization_table(federation: Federation, personalization: Personalization) -> Table:
    """Mean, spread and extremes of the test accuracies, in %."""
    if not personalization.adapts:
        return _table(f"{federation.method_name}, as trained: {score_name(federation, 'test')}, in %", federation)
    what = WHAT[personalization.train] + (", augmented" if personalization.augment else "")
    epochs = f"{personalization.epochs} epoch" + ("s" if personalization.epochs > 1 else "")
    return _table(f"{federation.method_name}, personalized ({what}, {epochs}): test accuracy, in %", federation)


def evaluation_table(federation: Federation, part: Part) -> Table:
    """The same of the models that a test or a validation has evaluated."""
    return _table(f"{federation.method_name}: {score_name(federation, part)}, in %", federation, part)


def _table(title: str, federation: Federation, part: Part = "test") -> Table:
    table = Table(title=title)
    for column in ("clients", "mean", "std", "variance", "worst\ndecile", "best", "worst"):  # 80 columns at most
        table.add_column(column, justify="left" if column == "clients" else "right")
    for name, (number, found) in _summaries(federation, part).items():
        figures = (100 * found.mean, 100 * found.std, 1e4 * found.std**2)
        extremes = (100 * found.worst_decile, 100 * found.best, 100 * found.worst)
        table.add_row(f"{number} {name.replace('_', ' ')}", *(f"{figure:.2f}" for figure in (*figures, *extremes)))
    return table


def write_personalization(
    federation: Federation, personalization: Personalization, folder: Path, rounds: int
) -> Path | None:
    """Write ``personalized.json`` (test accuracies in [0, 1]) and ``personalized.csv`` (a row for each client).

    The first begins as ``results.json`` does, with what identifies the run: data and partition among it.

    Clients that adapt nothing have the scores that the method gives without the stage, as ``evaluated`` says then.

    What is not known, such as a loss of a module without one, is ``null`` in the one and empty in the other.

    Both name the clients whose personalization failed, which are evaluated without it. Files of another
    personalization, or of another round, are kept as ``personalized-N.json`` and ``personalized-N.csv``.

    Args:
        federation: The federation, whose personalized clients were tested.
        personalization: What they adapted, and how.
        folder: Folder of the files.
        rounds: How many rounds the training had, 0 for none.

    Returns:
        The earlier file that was kept; ``None`` where there was none.
    """
    content: dict[str, Any] = {
        **run_facts(federation),
        "evaluated": ADAPTED if personalization.adapts else evaluated(federation),
        "part": "test",
        "round": rounds,
        "personalization": asdict(personalization),
        "not_personalized": federation.finetune_failures,
    }
    for name, (number, found) in _summaries(federation).items():
        figures = {**found.as_dict(), "variance": found.std**2}
        content[name] = {"num_clients": number, **{key: _known(value) for key, value in figures.items()}}
    text = as_text(content)
    kept = _keep_other(folder, json.loads(text))
    with replace_file(folder / PERSONALIZED) as temporary:
        temporary.write_text(text)
    novel, failed = set(federation.data.novel), set(federation.finetune_failures)
    with replace_file(folder / EVALUATIONS[PERSONALIZED]) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = ["client", "novel", "personalized", "train_samples", "rounds_trained", "test_samples"]
        writer.writerow([*columns, "test_accuracy", "test_loss"])
        trained = federation.rounds_trained
        for client, score in federation.test_scores.items():
            samples = len(federation.data.client_data(client).train)
            what = [int(client in novel), int(personalization.adapts and client not in failed)]
            row = [
                client,
                *what,
                samples,
                trained[client],
                score.num_samples,
                _known(score.accuracy),
                _known(score.loss),
            ]
            writer.writerow(row)
    return kept


def _keep_other(folder: Path, content: Mapping[str, Any]) -> Path | None:
    """Rename what is there, unless it is of the same personalization and round."""
    path = folder / PERSONALIZED
    if not path.is_file():
        return None
    with suppress(ValueError, AttributeError):  # a damaged file is kept, too
        earlier = json.loads(path.read_text())
        if all(earlier.get(key) == content[key] for key in ("personalization", "round", "seed")):
            return None
    return rename_aside(path)


def _known(figure: float) -> float | None:
    """The figure, or nothing for NaN."""
    return None if math.isnan(figure) else figure
