"""What ``pfl fit`` prints at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import lightning as L
from rich.table import Table

from pfl_lightning.callbacks import ResultsWriter
from pfl_lightning.callbacks.run_facts import score_name
from pfl_lightning.federation import Federation

__all__ = ["fit_table", "say_unevaluated"]


def fit_table(federation: Federation, writer: ResultsWriter) -> Table:
    """Test accuracies over clients in the rounds that were chosen, in %; without test parts, validation accuracies.

    What a method without a head is evaluated by is called a nearest-neighbor score.
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
