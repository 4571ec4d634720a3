"""The checkpoints of the last and of the best round, which are there after any kill."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

USUAL = "val_accuracy/mean"
"""Metric by which the best round is chosen by default; it is missing where no client has a validation part."""


class LastRound(ModelCheckpoint):
    """ModelCheckpoint of the last round; a checkpoint holds its state apart from that of a user's ModelCheckpoint."""


class BestRound(ModelCheckpoint):
    """ModelCheckpoint of the best round, which saves nothing where its metric does not exist.

    The metric is missing where no client has a validation part: the share may be zero, or the clients too small.

    A round that is no longer the best is removed in the next round, when ``last.ckpt`` names it no more: a kill may
    leave that as it was.

    Beside Lightning's names, a file's name may have ``{round}``, which counts from 1 as ``results.json`` does;
    ``{epoch}`` counts from 0.
    """

    _superseded: tuple[str, ...] = ()
    """Files that are no longer the best, and that ``last.ckpt`` may name still."""
    _has_warned = False

    def file_exists(self, filepath: str | Path, trainer: L.Trainer) -> bool:
        """Whether a file is to stay; in a resumed run the file of a round that runs again is not."""
        return str(filepath) in self.best_k_models if trainer.ckpt_path else super().file_exists(filepath, trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save if the round was validated."""
        if self.monitor in trainer.callback_metrics:
            super().on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save if the round was validated."""
        if self.monitor in trainer.callback_metrics:
            super().on_validation_end(trainer, pl_module)
        elif self.monitor != USUAL and not trainer.sanity_checking and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"there will be no checkpoint of the best round, since evaluations do not log {self.monitor!r}: set "
                f"its monitor to one of {', '.join(sorted(trainer.callback_metrics))}",
                stacklevel=2,
            )

    def _monitor_candidates(self, trainer: L.Trainer) -> dict[str, Tensor]:
        return {**super()._monitor_candidates(trainer), "round": torch.tensor(trainer.current_epoch + 1)}

    def _remove_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        self._superseded += (filepath,)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Remove what was the best before the last round."""
        super().on_train_batch_end(trainer, *args)
        self._remove_superseded(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove what was the best before the last round."""
        self._remove_superseded(trainer)

    def _remove_superseded(self, trainer: L.Trainer) -> None:
        for path in self._superseded:  # one of them may have gone before a kill
            super()._remove_checkpoint(trainer, path)
        self._superseded = ()

    def state_dict(self) -> dict[str, Any]:
        """The best rounds, and what is yet to be removed."""
        return super().state_dict() | ({"superseded": self._superseded} if self._superseded else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best rounds, also where the run's folder has another path by now."""
        here, best = Path(self.dirpath or ""), state_dict["best_k_models"]
        moved = {path: str(here / Path(path).name) for path in (*best, state_dict["best_model_path"]) if path}
        if moved and all(Path(path).is_file() for path in moved.values()):
            paths = {name: moved.get(state_dict[name], "") for name in ("best_model_path", "kth_best_model_path")}
            models = {moved[path]: score for path, score in best.items()}
            state_dict = {**state_dict, **paths, "best_k_models": models, "dirpath": self.dirpath}
        left = {path: here / Path(path).name for path in state_dict.get("superseded", ())}
        self._superseded = tuple(str(there) if there.is_file() else path for path, there in left.items())
        super().load_state_dict(state_dict)
