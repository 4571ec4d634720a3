"""``trainer.predict`` of a project's own module, which a checkpoint of its federation gives the global model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L

from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.drop_in.forms.loaded_module import restore
from pfl_lightning.drop_in.forms.trainer_data import GivenData
from pfl_lightning.drop_in.outer.changes import Changes
from pfl_lightning.drop_in.predictions import first_values, first_values_in, warn_of_unshared_parts
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.messages import State

__all__ = ["GlobalWeights"]


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
        self._changes = changes if changes is not None and changes.begin(module) else None
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
        if self._changes is not None:  # the module has run, and its own hooks may have changed it
            self._changes.end(self._module)

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
