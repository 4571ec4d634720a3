"""Layers that callbacks of local fits add to the module when a fit begins, such as a classifier that is trained beside.

In a plain run they are added once, and are there in all epochs and validations. Here they are part of the clients'
model from the start, so that they travel, are stored and are evaluated as its own layers are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from pfl_lightning.drop_in.outer.handed_in import copies, is_own

__all__ = ["KeepsAdded", "add_layers", "put_layer"]

_log = logging.getLogger(__name__)


def add_layers(
    callbacks: Iterable[L.Callback], module: L.LightningModule, copied: Callable[[], L.LightningModule], trainer: Any
) -> tuple[str, ...]:
    """Give a module the layers that callbacks add, or put in the place of others, in ``setup`` and ``on_fit_start``.

    Args:
        callbacks: Those of local fits, of which copies are called.
        module: The module.
        copied: Makes a copy of it, on which they are called: nothing else that they do to it is taken over.
        trainer: What they see as the Trainer.

    Returns:
        Names of these layers.
    """
    asked = [each for each in callbacks if is_own(each, "setup") or is_own(each, "on_fit_start")]
    if not asked:
        return ()
    trial = copied()
    before = dict(trial.named_modules())
    trial.trainer = trainer
    with isolate_rng(include_cuda=False):
        for callback in copies(asked):
            _begin(callback, "setup", trainer, trial, "fit")
            _begin(callback, "on_fit_start", trainer, trial)
    trial.trainer = None
    found: list[str] = []
    for name, layer in trial.named_modules():
        if before.get(name) is not layer and not name.startswith(tuple(f"{other}." for other in found)):
            found.append(name)
            put_layer(module, name, layer)
    return tuple(found)


def put_layer(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer into a module under its name there."""
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, layer)


class KeepsAdded(L.Callback):
    """Gives layers that other callbacks of an inner Trainer make once more the values that the client's have.

    Args:
        module: The module that the Trainer runs.
        names: Names of these layers.
        callbacks: Those of an evaluation, which have not seen the start of a fit and are shown it.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], callbacks: Sequence[L.Callback] = ()) -> None:
        self._layers = {name: module.get_submodule(name) for name in names}
        self._callbacks = callbacks

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """After the ``setup`` of the others."""
        with isolate_rng(include_cuda=False):
            for callback in self._callbacks:
                _begin(callback, "on_fit_start", trainer, pl_module)
        self.on_fit_start(trainer, pl_module)

    @torch.no_grad()
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """After that of the others."""
        for name, layer in self._layers.items():
            now = pl_module.get_submodule(name)
            if now is not layer:
                now.load_state_dict(layer.state_dict())
                self._layers[name] = now


def _begin(callback: L.Callback, hook: str, *args: Any) -> None:
    """Call a hook of the user's own, which may expect more of a fit than there is."""
    if not is_own(callback, hook):
        return
    try:
        getattr(callback, hook)(*args)
    except Exception as error:  # whatever the user's code raises
        _log.info("%s.%s ended in %r where no fit has begun", type(callback).__name__, hook, error)
