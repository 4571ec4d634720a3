"""What commands print at their end: tables of accuracies, and where the results are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

from pfl_lightning.callbacks import FederatedLoop, ResultsWriter
from pfl_lightning.callbacks.evaluation_file import Part
from pfl_lightning.callbacks.run_facts import score_name
from pfl_lightning.cli.personalize import evaluation_table, personalization_table, write_personalization
from pfl_lightning.federation import Federation
from pfl_lightning.report.output.notes import idle_clients

__all__ = ["fit_table", "print_evaluation", "print_fit", "print_personalization", "say_unevaluated"]


def print_fit(trainer: Any, federation: Federation) -> None:
    """Print a training's accuracies and where they are saved."""
    if trainer.fast_dev_run:
        return
    writer = _results_writer(trainer)
    folder = writer.folder(trainer)
    if not writer.chosen:
        say_unevaluated(trainer, folder)
        return
    Console().print(fit_table(federation, writer))
    print(f"Results: {folder}/results.json, clients.csv")
    if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
        print(f"TensorBoard: pfl tensorboard {folder.parent}")


def print_evaluation(trainer: Any, federation: Federation, name: Literal["test", "validate"]) -> None:
    """Print the accuracies of ``pfl test`` or ``pfl validate`` and where they are saved."""
    part: Part = "test" if name == "test" else "validation"
    folder = _results_writer(trainer).folder(trainer)
    scores = federation.test_scores if part == "test" else federation.validation_scores
    limit = "limit_test_batches" if part == "test" else "limit_val_batches"
    if not scores and getattr(trainer, limit) == 0:
        print(f"{limit} is 0: nothing was evaluated")
    elif not scores:
        print(f"No client has a {part} part: nothing was evaluated")
    elif (folder / f"{name}.json").is_file() and not trainer.fast_dev_run:
        Console().print(evaluation_table(federation, part))
        print(f"Results: {folder}/{name}.json, {name}_clients.csv")


def print_personalization(trainer: Any, federation: Federation, folder: Path) -> None:
    """Print the accuracies after a personalization, save them, and print where."""
    settings = trainer.personalization
    Console().print(personalization_table(federation, settings))
    loop = next(callback for callback in trainer.callbacks if isinstance(callback, FederatedLoop))
    kept = write_personalization(federation, settings, folder, loop.rounds)
    print(f"Results: {folder}/personalized.json, personalized.csv")
    if kept is not None:
        print(f"Those of an earlier personalization are kept: {kept}")


def _results_writer(trainer: Any) -> ResultsWriter:
    return next(callback for callback in trainer.callbacks if isinstance(callback, ResultsWriter))


def fit_table(federation: Federation, writer: ResultsWriter) -> Table:
    """Test accuracies over clients in the rounds that were chosen, in %; without test parts, validation accuracies.

    What a method without a head is evaluated by is called a nearest-neighbor score. A line below names the clients that
    no round has trained, whose models are those of the beginning.
    """
    some, every = writer.evaluated_clients, federation.num_clients
    clients = f"{every} clients" if some == every else f"{some} of {every} clients"
    part: Literal["test", "validation"] = "test" if writer.summaries("test") else "validation"
    table = Table(title=f"{federation.method_name}: {score_name(federation, part)} over {clients}, in %")
    for column in ("choice", "round", "mean", "std", "worst\ndecile", "best", "worst"):  # 80 columns at most
        table.add_column(column, justify="left" if column == "choice" else "right")
    for choice, summary in writer.summaries(part).items():
        figures = (summary.mean, summary.std, summary.worst_decile, summary.best, summary.worst)
        table.add_row(choice, str(writer.chosen[choice].round), *(f"{100 * figure:.2f}" for figure in figures))
    said = idle_clients(federation.never_trained, getattr(writer.chosen.get("last"), part, {}))
    if said:
        table.caption, table.caption_justify = f"{said}: no round drew them, or their updates were left out", "left"
    return table


def say_unevaluated(trainer: L.Trainer, folder: Path) -> None:
    """Say that a run has ended without accuracies, and how to get them."""
    every, last = trainer.check_val_every_n_epoch, folder / "checkpoints" / "last.ckpt"
    why = f" (check_val_every_n_epoch is {every}, and the run has {trainer.current_epoch} rounds)"
    told = f"; `pfl test --ckpt_path {last}` with the options of this run evaluates the last one"
    print(
        f"Results: {folder}/results.json, without accuracies: no round was evaluated"
        f"{why if every and every > trainer.current_epoch else ''}{told if last.is_file() else ''}"
    )
