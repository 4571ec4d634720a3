"""Where the callbacks of a command write, and in which order they come."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from pfl_lightning.callbacks import ResultsWriter
from pfl_lightning.callbacks.inspection import InspectionCallback
from pfl_lightning.cli.runs.slurm import SlurmCommand
from pfl_lightning.cli.runs.trainer import SaveConfig
from pfl_lightning.state.checkpoints.best_round import BestRound, LastRound

__all__ = ["place_callbacks"]


def place_callbacks(trainer: L.Trainer, folder: Path, slurm: SlurmCommand | None, *, checkpoints: bool) -> None:
    """Let the Trainer's callbacks write to the run's folder, and add the one that saves the last round.

    Args:
        trainer: The Trainer, with all other callbacks.
        folder: The run's folder; a callback with a folder of its own keeps that.
        slurm: SLURM's command, if the run is one of its jobs.
        checkpoints: Whether the Trainer writes checkpoints.
    """
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, ResultsWriter):
            callback.dirpath = callback.dirpath or str(folder)
        elif isinstance(callback, BestRound):
            callback.dirpath = callback.dirpath or str(folder / "checkpoints")
        elif isinstance(callback, InspectionCallback):
            callback.dirpath = callback.dirpath or str(folder / "inspection")
        elif isinstance(callback, SaveConfig):
            callback.folder, callback.slurm = folder, slurm
    if checkpoints:
        # save_last of ModelCheckpoint follows the best round: it writes only when a best round is written.
        last = LastRound(folder / "checkpoints", "last", enable_version_counter=False, save_on_train_epoch_end=True)
        callbacks.append(last)
    # A checkpoint that another callback saves has this round as the best one, if it is.
    callbacks.sort(key=lambda one: isinstance(one, Checkpoint) and not isinstance(one, BestRound))
