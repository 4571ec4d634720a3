"""What commands print at their end: tables of accuracies, and where the results are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console

from pfl_lightning.callbacks import ResultsWriter
from pfl_lightning.callbacks.evaluation_file import Part
from pfl_lightning.callbacks.results_table import fit_table
from pfl_lightning.cli.personalize import evaluation_table, personalization_table, write_personalization
from pfl_lightning.federation import Federation
from pfl_lightning.federation.loop import RoundLoop
from pfl_lightning.runs.files import last_checkpoint

__all__ = ["print_evaluation", "print_fit", "print_personalization", "say_unevaluated"]


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
    loop = next(callback for callback in trainer.callbacks if isinstance(callback, RoundLoop))
    kept = write_personalization(federation, settings, folder, loop.rounds)
    print(f"Results: {folder}/personalized.json, personalized.csv")
    if kept is not None:
        print(f"Those of an earlier personalization are kept: {kept}")


def _results_writer(trainer: Any) -> ResultsWriter:
    return next(callback for callback in trainer.callbacks if isinstance(callback, ResultsWriter))


def say_unevaluated(trainer: L.Trainer, folder: Path) -> None:
    """Say that a run has ended without accuracies, and how to get them."""
    every, last = trainer.check_val_every_n_epoch, last_checkpoint(folder)
    why = f" (check_val_every_n_epoch is {every}, and the run has {trainer.current_epoch} rounds)"
    told = f"; `pfl test --ckpt_path {last}` with the options of this run evaluates the last one"
    print(
        f"Results: {folder}/results.json, without accuracies: no round was evaluated"
        f"{why if every and every > trainer.current_epoch else ''}{told if last.is_file() else ''}"
    )
