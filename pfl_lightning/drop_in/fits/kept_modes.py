"""What a module freezes, thaws or sets into a mode in one local fit stays so in the client's later fits."""

from __future__ import annotations

from collections.abc import Mapping

import lightning as L

from pfl_lightning.federation.outer_callbacks import lightning_kinds

__all__ = ["KeptModes"]


class KeptModes(L.Callback):
    """Brings ``requires_grad`` and the modes of layers to where the client's last fit has left them.

    A plain run calls ``on_fit_start`` and ``on_train_start`` once, and a module that thaws a part at one epoch leaves
    it thawed. Here every local fit calls them, so that what they set is taken back before its first epoch. Optimizers
    are made before, as in the first fit, so that they have the same parameters in every fit.

    Args:
        changed: What differed at the end of the client's last fit: see :attr:`changed`.
    """

    def __init__(self, changed: Mapping[str, bool]) -> None:
        self._earlier, self._begun = changed, False
        self._start: dict[str, bool] = {}
        self.changed: dict[str, bool] = {}
        """What of the fit's end differs from its start, before the first epoch: ``requires_grad`` by the names of
        parameters, and the training mode of layers by names with a final dot."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before the first epoch, set what the last fit has left."""
        if self._begun:
            return
        self._begun, self._start = True, _modes(pl_module)
        for name, parameter in pl_module.named_parameters():
            parameter.requires_grad_(self._earlier.get(name, parameter.requires_grad))
        for name, layer in pl_module.named_modules():
            layer.training = self._earlier.get(f"{name}.", layer.training)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note what the fit has changed, but not what hooks of its end do."""
        if any("BaseFinetuning" in lightning_kinds(callback) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            return  # which thaw again by themselves
        end = _modes(pl_module)
        self.changed = {name: value for name, value in end.items() if self._start.get(name, value) != value}


def _modes(module: L.LightningModule) -> dict[str, bool]:
    modes = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    return modes | {f"{name}.": layer.training for name, layer in module.named_modules()}
