"""What callbacks of a user's project see of a federation: the global model, and the module's hyper-parameters."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from weakref import ref

import lightning as L
import torch
from torch import Tensor, nn

from pfl_lightning.drop_in.client.plain_state import load_plain_state
from pfl_lightning.drop_in.client.user_module import NETWORKS
from pfl_lightning.drop_in.outer.user_module_owner import UserModuleOwner
from pfl_lightning.errors import FederationError
from pfl_lightning.federation import Federation
from pfl_lightning.lightning_private import HYPERPARAMETERS, name_of_hyperparameters, trainer_or_none
from pfl_lightning.state.checkpoints import plain, python_numbers

_NEVER_SHOWN = {
    *(name for kind in Federation.__mro__ for name in vars(kind).get("__annotations__", ())),
    "_orig_mod",  # of compiled modules
    *HYPERPARAMETERS,
    "training_epoch_end",  # hooks of Lightning 1, for which Lightning looks
    "validation_epoch_end",
    "test_epoch_end",
}
"""Names that are the federation's own, though it may not have them yet, and those that Lightning asks for."""


@dataclass
class _Shown:
    """A copy of the module that holds the global model; apart, so that it is no part of the federation's own state.

    Attributes:
        module: The copy.
        values: The server's tensors that it holds, with their versions, on a device: not the tensors themselves, since
            they would be kept; none of old ones.
    """

    module: L.LightningModule
    values: list[tuple[ref[Tensor], int]] | None = None
    device: torch.device | None = None


class ShowsGlobalModel(Federation):
    """Gives callbacks the global model where they ask the federation for what only the user's module has.

    ``pl_module(x)``, ``pl_module.layer``, ``pl_module.method()`` are those of :attr:`shown`. Names that the federation
    itself has (``models``, ``clients``, ``server``, ``data``, ``round``, ...) stay its own, and so do all hooks.
    """

    _shown: _Shown | None = None

    owner: UserModuleOwner
    """The module that the federation was made of, and its copies."""

    @property
    def given_module(self) -> L.LightningModule:
        """The module that the federation was made of; when a call of the Trainer is over, it has the global model."""
        return self.owner.module

    def global_model(self) -> L.LightningModule:
        """The model that the server would send, of the class that was given; it is the caller's.

        Where each client is sent weights of its own (FedPAC's heads), it is the model that client 0 would be sent. What
        never travels under the method has the values that it had before the first round.
        """
        if not self.is_set_up:
            raise FederationError("there is no global model before trainer.fit, validate or test has set it up")
        client: Any = copy.deepcopy(self.clients.models[0])
        client.user_module.networks_as_given()
        module: L.LightningModule = client.exported_module()
        self.load_global(module)
        return module

    def load_global(self, module: nn.Module) -> None:
        """Load the model that the server would send (to client 0) into a copy of the module."""
        state = {**self.clients.first_state(0), **self.server.broadcast(0, self.round).weights}
        for prefix in NETWORKS:
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            load_plain_state(module, own)

    @property
    def shown(self) -> L.LightningModule:
        """The global model after the last aggregation, in evaluation mode, on the federation's device.

        It is one copy, loaded again when it is asked for after the server has changed. What is written to it reaches
        neither server nor clients. Before the federation is set up, it is the module that was given.
        """
        if not self.is_set_up:
            return self.given_module
        if self._shown is None:
            with torch.inference_mode(False), torch.no_grad():  # callbacks may ask for gradients later
                self._shown = _Shown(self.global_model())
            vars(self._shown.module)["log"] = self.log  # a method of the module may log
        shown, tensors = self._shown, [*self.server.parameters(), *self.server.buffers()]
        held = shown.values if shown.device == self.device and len(shown.values or ()) == len(tensors) else None
        if held is None or not all(old() is new and seen == new._version for (old, seen), new in zip(held, tensors)):
            with torch.inference_mode(False), torch.no_grad():
                self.load_global(shown.module)
                shown.module.to(self.device).eval()
            shown.values, shown.device = [(ref(tensor), tensor._version) for tensor in tensors], self.device
        if trainer_or_none(shown.module) is not trainer_or_none(self):
            shown.module.trainer = trainer_or_none(self)
        return shown.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the global model gives, in evaluation mode; see :attr:`shown`."""
        return self.shown.eval()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the global model, where the federation has none of this name; see :attr:`shown`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or name in _NEVER_SHOWN or hasattr(type(self), name) or "owner" not in vars(self):
                raise
            module = self.clients.models[0].module if self.is_set_up else self.given_module
            if not (hasattr(type(module), name) or hasattr(module, name)):  # a property is not asked for its value
                raise
        return getattr(self.shown, name)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what can be read without the project's classes, where ``load_from_checkpoint`` looks for it.

        The method's name is left out: ``load_from_checkpoint`` takes these for arguments of the module.
        """
        own: Any = self.given_module
        kept = {n: v for n, v in python_numbers(dict(own.hparams)).items() if plain(n) and plain(v)}
        name = name_of_hyperparameters(own) if own.hparams else None
        for key, value in ((self.CHECKPOINT_HYPER_PARAMS_KEY, kept), (self.CHECKPOINT_HYPER_PARAMS_NAME, name)):
            checkpoint.pop(key, None)
            if value:
                checkpoint[key] = value
        super().on_save_checkpoint(checkpoint)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the clients' states; the global model is then another, and is loaded when it is asked for."""
        super().set_extra_state(state)
        if self._shown is not None:
            self._shown.values = None

    def __getstate__(self) -> dict[str, Any]:
        """State without the copy that is shown, which is made when it is asked for."""
        return {**super().__getstate__(), "_shown": None}
