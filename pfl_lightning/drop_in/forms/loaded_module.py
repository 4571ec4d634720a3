"""Modules that ``load_from_checkpoint`` read from a checkpoint of a federation, to be validated or tested."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch

from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.drop_in.forms.trainer_data import GivenData
from pfl_lightning.drop_in.outer.fingerprint import Changes
from pfl_lightning.drop_in.predictions import first_values, first_values_in, warn_of_unshared_parts
from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.messages import State
from pfl_lightning.state.checkpoints.file import FEDERATION, read_checkpoint

__all__ = ["GlobalWeights", "checkpoint_of", "restore", "warn_of_other_weights"]

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


class GlobalWeights:
    """Gives a plain module the global model of a federation's checkpoint, when the Trainer loads one into it.

    The module has the place of its hook ``on_load_checkpoint`` taken until :meth:`leave`.

    Args:
        module: The module that predicts.
        federation: Gives the federation of the module and its data.
        given: What the Trainer was given.
        trainer: The Trainer.
        changes: What knows the module as the last fit left it; ``None`` where none did.
    """

    def __init__(
        self,
        module: L.LightningModule,
        federation: Callable[[], tuple[Any, Any]],
        given: GivenData,
        trainer: L.Trainer,
        changes: Changes | None = None,
    ) -> None:
        self._module, self._federation, self._given, self._trainer = module, federation, given, trainer
        self._changes, self._values = changes, None if changes is None else changes.begin(module)
        self._warned = False
        self._before = vars(module).get("on_load_checkpoint")
        vars(module)["on_load_checkpoint"] = self._load

    def warn(self, first: State, state: State | None = None) -> None:
        """Warn once of parts of the global model that clients do not share."""
        self._warned = self._warned or warn_of_unshared_parts(self._module, first, state)

    def leave(self) -> None:
        """Give the hook back."""
        vars(self._module).pop("on_load_checkpoint", None)
        if self._before is not None:
            vars(self._module)["on_load_checkpoint"] = self._before
        if self._changes is not None and self._values is not None:  # the module's own hooks may have changed it
            self._changes.end(self._module, self._values)

    def _load(self, checkpoint: dict[str, Any]) -> None:
        self.leave()
        if "_extra_state" in checkpoint["state_dict"]:  # not one of the module alone
            checkpoint["state_dict"] = self._global_state(checkpoint)
        self.warn(first_values_in(checkpoint), checkpoint["state_dict"])
        self._module.on_load_checkpoint(checkpoint)

    def _global_state(self, checkpoint: dict[str, Any]) -> Mapping[str, Any]:
        federation, data = self._federation()
        trainer: Any = self._trainer
        try:
            restore(federation, data, trainer, checkpoint, "predict")
        finally:
            if self._given.datamodule is not None:  # whose training data were asked for since
                self._given.datamodule.trainer = trainer
                self._given.datamodule.setup("predict")
        state: Mapping[str, Any] = plain_state(federation.global_model())
        self.warn(first_values(federation), state)
        if state.keys() != plain_state(self._module).keys():
            raise ConfigurationError(
                f"{type(self._module).__name__} makes its layers in setup or configure_model, so that it cannot be "
                "given the global model of a checkpoint: federation.global_model() has it after trainer.test"
            )
        return state
