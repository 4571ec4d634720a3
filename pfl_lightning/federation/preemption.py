"""Preemption of a job on a SLURM cluster: its signal waits for the end of the round."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Checkpoint


class Preemption(Checkpoint):
    """Puts off what Lightning does on SLURM's signal, a checkpoint and ``scontrol requeue``, to the end of the round.

    A checkpoint from the middle of a round cannot be resumed. If SLURM ends the job (SIGTERM) before the round is over,
    the round is dropped: the job is requeued at once, and goes on from the checkpoint of the round before.

    It is one of the Trainer's ``Checkpoint`` callbacks and the last of them, so that all others have seen the round.
    """

    def __init__(self) -> None:
        self._due: Callable[[], None] | None = None

    @staticmethod
    def is_needed(trainer: L.Trainer) -> bool:
        """Whether the Trainer runs as a job of SLURM."""
        return isinstance(trainer._accelerator_connector.cluster_environment, SLURMEnvironment)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take the place of Lightning's handlers in a fit, and give it back in an evaluation, which has no rounds.

        Lightning registers them later, unless the environment's ``auto_requeue`` is off.
        """
        self._due = None
        connector: Any = trainer._signal_connector
        for name in ("_slurm_sigusr_handler_fn", "_sigterm_handler_fn"):
            vars(connector).pop(name, None)
        if stage == "fit":
            connector._slurm_sigusr_handler_fn = partial(self._put_off, connector._slurm_sigusr_handler_fn)
            connector._sigterm_handler_fn = self._drop

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Do what was put off: the round is over, and its state can be gone on from."""
        due, self._due = self._due, None
        if due is not None:
            due()

    def _put_off(self, handler: Callable[[int, None], None], signum: int, frame: FrameType | None) -> None:
        # No message: one might be in the middle of being printed, and Lightning logs what it does at the round's end.
        self._due = partial(handler, signum, None)

    def _drop(self, signum: int, frame: FrameType | None) -> None:
        if self._due is not None:
            self._due = None
            requeue()


def slurm_job() -> str | None:
    """The number by which ``scontrol`` knows this process's job; ``None`` outside of SLURM."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")


def requeue() -> None:
    """Let SLURM start this process's job again."""
    job = slurm_job()
    try:
        subprocess.run(["scontrol", "requeue", str(job)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        warnings.warn(
            f"job {job} could not be requeued ({error}); submit it again to resume from its last checkpoint",
            stacklevel=2,
        )
