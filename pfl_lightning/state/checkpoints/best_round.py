"""The checkpoints of the last and of the best round, which are there after any kill."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from string import Formatter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

__all__ = ["BestRound", "LastRound"]

USUAL = "accuracy/mean"
"""What the best round is chosen by, unless told otherwise; it is missing where no client has a validation part."""

LAST = f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}{ModelCheckpoint.FILE_EXTENSION}"


class LastRound(ModelCheckpoint):
    """ModelCheckpoint of the last round; a checkpoint holds its state apart from that of a user's ModelCheckpoint."""


class BestRound(ModelCheckpoint):
    """ModelCheckpoint of the best round, which saves nothing where its metric does not exist.

    The metric is missing where no client has a validation part: the share may be zero, or the clients too small.

    A round that is no longer the best is removed when the next round begins. By then ``last.ckpt`` names the new one; a
    kill before that leaves the old one, which the ``last.ckpt`` of the round before names. What a kill leaves over is
    removed when the run is resumed.

    Beside Lightning's names, a file's name may have ``{round}``, which counts from 1 as ``results.json`` does;
    ``{epoch}`` counts from 0.
    """

    _superseded: tuple[str, ...] = ()
    _has_warned = False

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
                f"the checkpoint of the best round watches {self.monitor!r}, which is not among the values of an "
                f"evaluation, so that there will be none: {', '.join(sorted(trainer.callback_metrics))}",
                stacklevel=2,
            )

    def _monitor_candidates(self, trainer: L.Trainer) -> dict[str, Tensor]:
        return {**super()._monitor_candidates(trainer), "round": torch.tensor(trainer.current_epoch + 1)}

    def _remove_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        self._superseded += (filepath,)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove what was the best before the last round."""
        for path in self._superseded:
            super()._remove_checkpoint(trainer, path)
        self._superseded = ()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove what was the best before the last round."""
        super().on_train_end(trainer, pl_module)
        self.on_train_epoch_start(trainer, pl_module)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove what a kill left over: files of this callback that the run's ``last.ckpt`` does not know."""
        pattern = self._pattern()
        if pattern is None or not self.best_k_models or Path(trainer.ckpt_path or "").name != LAST:
            return
        if any(self._may_write_such(other) for other in trainer.checkpoint_callbacks):
            return
        known = {Path(path).name for path in (*self.best_k_models, self.best_model_path)}
        for path in Path(self.dirpath or "").iterdir():
            if pattern.fullmatch(path.name) and path.name not in known:
                path.unlink()

    def _pattern(self) -> re.Pattern[str] | None:
        """What this callback's files are called, half-written ones too; ``None`` where that could be anything."""
        parts = list(Formatter().parse(self.filename or ""))
        if not parts or not parts[0][0]:
            return None
        number = r"([^-]*=)?(-?\d+(\.\d+)?(e[+-]?\d+)?|nan|-?inf)"
        name = "".join(re.escape(text) + (number if field is not None else "") for text, field, _, _ in parts)
        return re.compile(rf"{name}(-v\d+)?{re.escape(self.FILE_EXTENSION)}|\.{name}.*\.tmp")

    def _may_write_such(self, other: Any) -> bool:
        """Whether another callback writes files into the same folder that begin as those of this one."""
        if other is self or not isinstance(other, ModelCheckpoint) or str(other.dirpath) != str(self.dirpath):
            return False
        begin, others = ((one.filename or "").split("{")[0] for one in (self, other))
        return begin.startswith(others) or others.startswith(begin)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best rounds, also where the run's folder has another path by now."""
        here, best = Path(self.dirpath or ""), state_dict["best_k_models"]
        moved = {path: str(here / Path(path).name) for path in (*best, state_dict["best_model_path"]) if path}
        if moved and all(Path(path).is_file() for path in moved.values()):
            paths = {name: moved.get(state_dict[name], "") for name in ("best_model_path", "kth_best_model_path")}
            models = {moved[path]: score for path, score in best.items()}
            state_dict = {**state_dict, **paths, "best_k_models": models, "dirpath": self.dirpath}
        super().load_state_dict(state_dict)
