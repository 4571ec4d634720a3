"""What commands print and write at their end: tables of accuracies, where the results are, and personalized.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

from pfl_lightning.callbacks.results import results_writer
from pfl_lightning.callbacks.run_facts import Part, client_rows, evaluated, further_metrics, run_facts, score_name
from pfl_lightning.callbacks.tables import fit_table
from pfl_lightning.data import names_of
from pfl_lightning.federation import Federation
from pfl_lightning.federation.loop import loop_of
from pfl_lightning.metrics import EvalMetrics, summarize
from pfl_lightning.notices import named_clients
from pfl_lightning.phases import Personalization
from pfl_lightning.runs.files import EVALUATIONS, PERSONALIZED, last_checkpoint, rename_aside
from pfl_lightning.runs.results import as_text, summary_of, values_by_metric
from pfl_lightning.state.files import replace_file


def print_fit(trainer: Any, federation: Federation) -> None:
    """Print a training's accuracies and where they are saved; or that it has none, and how to get them."""
    if trainer.fast_dev_run:
        return
    writer: Any = results_writer(trainer)  # the command line adds one
    folder = writer.folder(trainer)
    if federation.mechanism is not None:
        spent = federation.mechanism.facts()
        print(f"Privacy: epsilon {spent['epsilon']:.4g} at delta {spent['delta']:.2g}, after {spent['rounds']} rounds")
    if writer.chosen:
        Console().print(fit_table(federation, writer))
        print(f"Results: {folder}/results.json, clients.csv")
        if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            print(f"TensorBoard: tensorboard --logdir {folder.parent}")
        return
    every, last = trainer.check_val_every_n_epoch, last_checkpoint(folder)
    why = f" (check_val_every_n_epoch is {every}, and the run has {trainer.current_epoch} rounds)"
    how = f"; `pfl test --ckpt_path {last}` with the options of this run evaluates the last one"
    print(
        f"Results: {folder}/results.json, without accuracies: no round was evaluated"
        f"{why if every and every > trainer.current_epoch else ''}{how if last.is_file() else ''}"
    )


def print_evaluation(trainer: Any, federation: Federation, name: Literal["test", "validate"]) -> None:
    """Print the accuracies of ``pfl test`` or ``pfl validate`` and where they are saved."""
    part: Part = "test" if name == "test" else "validation"
    writer: Any = results_writer(trainer)
    folder = writer.folder(trainer)
    limit = "limit_test_batches" if part == "test" else "limit_val_batches"
    if not _scores(federation, part):
        print(f"No client has a {part} part, or {limit} is 0: nothing was evaluated")
    elif (folder / f"{name}.json").is_file() and not trainer.fast_dev_run:
        title = f"{federation.method_name}: {score_name(federation, part)}, in %"
        Console().print(evaluation_table(title, federation, part))
        print(f"Results: {folder}/{name}.json, {name}_clients.csv")


def print_personalization(trainer: Any, federation: Federation, folder: Path) -> None:
    """Print the accuracies after a personalization, save them, and print where."""
    settings = trainer.personalization
    Console().print(personalization_table(federation, settings))
    kept = write_personalization(federation, settings, folder, loop_of(trainer).rounds)
    print(f"Results: {folder}/personalized.json, personalized.csv")
    if kept is not None:
        print(f"Those of an earlier personalization are kept: {kept}")


def _scores(federation: Federation, part: Part) -> Mapping[int, EvalMetrics]:
    return federation.test_scores if part == "test" else federation.validation_scores


ADAPTED = {"score": "classifier", "model": "fine_tuned"}
"""What an evaluation gives after clients have adapted something."""


def _groups(federation: Federation, part: Part = "test", metric: str = "accuracy") -> dict[str, dict[int, float]]:
    """A metric of clients that trained, of those that could have and did not, and of novel ones."""
    novel, idle, scores = set(federation.data.novel), set(federation.never_trained), _scores(federation, part)
    if metric == "accuracy":
        known = {client: score.accuracy for client, score in scores.items()}
    else:
        known = values_by_metric(scores).get(metric, {})
    groups = {
        "participating": {c: value for c, value in known.items() if c not in novel | idle},
        "never_trained": {c: value for c, value in known.items() if c in idle},
        "novel": {c: value for c, value in known.items() if c in novel},
    }
    return {name: own for name, own in groups.items() if own}


def personalization_table(federation: Federation, personalization: Personalization) -> Table:
    """That of the test accuracies after a personalization."""
    if not personalization.adapts:
        title = f"{federation.method_name}, as trained: {score_name(federation, 'test')}, in %"
        return evaluation_table(title, federation)
    how = personalization.train + ", augmented" * personalization.augment
    how += f", {personalization.epochs} epoch" + "s" * (personalization.epochs > 1)
    return evaluation_table(f"{federation.method_name}, personalized ({how}): test accuracy, in %", federation)


def evaluation_table(title: str, federation: Federation, part: Part = "test") -> Table:
    """Mean, spread and extremes of the accuracies on a part of the clients' data, in %."""
    table, names = Table(title=title), names_of(federation.data)
    for column in ("clients", "mean", "std", "variance", "worst\ndecile", "best", "worst"):  # 80 columns at most
        table.add_column(column, justify="left" if column == "clients" else "right")
    for metric in ("accuracy", *federation.class_metrics):
        is_lower = metric in federation.class_metrics and federation.class_metrics[metric].lower_is_better
        for name, own in _groups(federation, part, metric).items():
            found = summarize(own, lower_is_better=is_lower)
            figures = (100 * found.mean, 100 * found.std, 1e4 * found.std**2)
            extremes = (100 * found.worst_decile, 100 * found.best, 100 * found.worst)
            clients = f"{len(own)} {name.replace('_', ' ')}" + ("" if metric == "accuracy" else f"\n{metric}")
            table.add_row(clients, *(f"{figure:.2f}" for figure in (*figures, *extremes)))
            if names and table.caption is None:
                worst = named_clients([found.worst_client], names)
                table.caption, table.caption_justify = f"worst of the {name.replace('_', ' ')}: {worst}", "left"
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
    samples = {client: score.num_samples for client, score in federation.test_scores.items()}

    def groups(metric: str = "accuracy", lower_is_better: bool = False) -> dict[str, Any]:
        found = _groups(federation, "test", metric)
        return {name: summary_of(own, samples, lower_is_better) for name, own in found.items()}

    content |= {**groups(), **further_metrics(federation, groups)}
    text = as_text(content)
    kept = _keep_other(folder, json.loads(text))
    adapted = {*samples} - {*federation.finetune_failures} if personalization.adapts else set()
    files = {PERSONALIZED: text, EVALUATIONS[PERSONALIZED]: client_rows(federation, "test", adapted)}
    for file, written in files.items():
        with replace_file(folder / file) as temporary:
            temporary.write_text(written, newline="")
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
