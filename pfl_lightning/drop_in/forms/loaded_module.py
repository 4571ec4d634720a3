"""Modules that ``load_from_checkpoint`` read from a checkpoint of a federation, to be validated or tested."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch

from pfl_lightning.errors import CheckpointError
from pfl_lightning.state.checkpoints.file import read_checkpoint
from pfl_lightning.state.checkpoints.module import FEDERATION

__all__ = ["checkpoint_of", "restore", "warn_of_other_weights"]

_log = logging.getLogger(__name__)


def checkpoint_of(module: L.LightningModule, trainer: Any) -> dict[str, Any] | None:
    """The checkpoint that the Trainer has written of a federation with the module's weights; ``None`` for none."""
    state = module.state_dict()
    for path in _written(trainer):
        try:
            found = read_checkpoint(path, weights_only=True)
        except CheckpointError:  # damaged, or of something else that lies there
            continue
        if FEDERATION in found and _has(state, found["state_dict"]):
            _log.info("%s has the weights of %s: clients are evaluated as they were then", type(module).__name__, path)
            return found
    return None


def _written(trainer: Any) -> Iterator[Path]:
    """The Trainer's files, the best first."""
    found: dict[Path, None] = {}
    for callback in trainer.checkpoint_callbacks:
        paths = [getattr(callback, name, "") for name in ("best_model_path", "last_model_path")]
        found |= {Path(path): None for path in paths if path}
        folder = getattr(callback, "dirpath", None)
        found |= dict.fromkeys([] if folder is None else sorted(Path(folder).glob("*.ckpt")))
    yield from (path for path in found if path.is_file())


def _has(state: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether a module has the values of a checkpoint, which may leave out some."""
    tensors = {name: value for name, value in saved.items() if isinstance(value, torch.Tensor)}
    return bool(tensors) and all(
        name in state and state[name].shape == value.shape and torch.equal(state[name].cpu(), value)
        for name, value in tensors.items()
    )


def warn_of_other_weights(module: L.LightningModule, is_fitted: bool, federation: Any) -> None:
    """Warn that a module's weights are those of no checkpoint, which would have the clients' own parts, too.

    Args:
        module: The module.
        is_fitted: Whether the Trainer has fitted another one.
        federation: That of the module, set up.
    """
    name = type(module).__name__
    if is_fitted:
        warnings.warn(
            f"this {name} is another one than the Trainer has fitted, and its weights are those of none "
            "of its checkpoints: every client is evaluated with them. The fitted one (with ckpt_path='best' for the "
            "best round) is evaluated with each client's own model",
            stacklevel=2,
        )
    elif any(value.is_floating_point() for value in federation.clients.personal.get(0).values()):
        warnings.warn(
            f"no fit came before, and no ckpt_path is given: every client is evaluated with the weights that this "
            f"{name} holds. With ckpt_path=, a checkpoint of a federation, each is evaluated with its own model",
            stacklevel=2,
        )


def restore(federation: Any, data: Any, trainer: Any, checkpoint: dict[str, Any], stage: str) -> None:
    """Set up a federation outside of a Trainer's own order, and let it go on from a checkpoint.

    Args:
        federation: The federation.
        data: Its data.
        trainer: The Trainer, whose data module is another one.
        checkpoint: The checkpoint, which is used up.
        stage: The stage as Lightning tells ``setup``.
    """
    before, trainer.datamodule, federation.trainer = trainer.datamodule, data, trainer
    try:
        data.prepare_data()
        data.setup(stage)
        federation.setup(stage)
        federation.on_load_checkpoint(checkpoint)
        federation.load_state_dict(checkpoint["state_dict"])
    finally:
        trainer.datamodule = before
