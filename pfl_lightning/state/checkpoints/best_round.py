"""The checkpoints of the last and of the best round, which are there after any kill."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from string import Formatter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from pfl_lightning.errors import CheckpointError
from pfl_lightning.state.checkpoints.file import read_checkpoint
from pfl_lightning.state.checkpoints.writing import previous_of

__all__ = ["BestRound", "LastRound"]

USUAL = "val_accuracy/mean"
"""Metric by which the best round is chosen by default; it is missing where no client has a validation part."""

LAST = f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}{ModelCheckpoint.FILE_EXTENSION}"


class LastRound(ModelCheckpoint):
    """ModelCheckpoint of the last round; a checkpoint holds its state apart from that of a user's ModelCheckpoint."""


class BestRound(ModelCheckpoint):
    """ModelCheckpoint of the best round, which saves nothing where its metric does not exist.

    The metric is missing where no client has a validation part: the share may be zero, or the clients too small.

    A round that is no longer the best is removed in the next round, once nothing names it: neither ``last.ckpt``, which
    a kill may leave as it was, nor the one before that, as long as that is kept. What a kill leaves over is removed
    when the run is resumed.

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

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Remove what was the best before the last round."""
        super().on_train_batch_end(trainer, *args)
        self._remove_superseded(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove what was the best before the last round."""
        self._remove_superseded(trainer)

    def _remove_superseded(self, trainer: L.Trainer) -> None:
        if self._superseded and not self._previous.is_file():
            for path in self._superseded:
                super()._remove_checkpoint(trainer, path)
            self._superseded = ()

    @property
    def _previous(self) -> Path:
        return previous_of(Path(self.dirpath or "") / LAST)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove what a kill left over: files of this callback that neither checkpoint of the last rounds knows."""
        pattern = self._pattern()
        resumed = Path(trainer.ckpt_path or "").name
        if pattern is None or not self.best_k_models or resumed not in (LAST, self._previous.name):
            return
        if any(self._may_write_such(other) for other in trainer.checkpoint_callbacks):
            return
        known, before = _names(self.state_dict()), set[str]()
        if resumed == LAST and self._previous.is_file():
            with suppress(CheckpointError):  # a damaged one names nothing
                before = _names(read_checkpoint(self._previous, weights_only=True)["callbacks"][self.state_key])
        for path in Path(self.dirpath or "").iterdir():
            if pattern.fullmatch(path.name) and path.name not in known:
                if path.name in before:
                    self._superseded += (str(path),)
                else:
                    path.unlink()

    def _pattern(self) -> re.Pattern[str] | None:
        """Pattern of the names of this callback's files, half-written ones too; ``None`` where they may be anything."""
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


def _names(state: Mapping[str, Any]) -> set[str]:
    """Files that the state of a ModelCheckpoint knows."""
    return {Path(path).name for path in (*state.get("best_k_models", ()), state.get("best_model_path", "")) if path}
