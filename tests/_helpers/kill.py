"""A callback for a process of its own that dies in the middle of a round."""

import os
import signal
from typing import Any

import lightning as L


class KillInRound(L.Callback):
    """SIGKILL: no handler, no clean-up, no last checkpoint."""

    def __init__(self, round: int, batch: int) -> None:
        self.round, self.batch = round, batch

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == self.round and batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)
