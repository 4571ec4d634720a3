"""The module that a federation was made of: copies of it, and the global model in them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import lightning as L
from torch import Tensor, nn

from pfl_lightning.drop_in.client.copies import Factory, copied
from pfl_lightning.drop_in.client.frozen import frozen_parameters
from pfl_lightning.drop_in.client.module_client import ModuleClient
from pfl_lightning.drop_in.client.network_parts import NETWORKS
from pfl_lightning.drop_in.client.parts import ClientParts
from pfl_lightning.drop_in.client.plain_state import load_plain_state, plain_state
from pfl_lightning.drop_in.fits.added_layers import put_layer
from pfl_lightning.drop_in.outer.changes import Changes
from pfl_lightning.drop_in.outer.gained import Gained
from pfl_lightning.drop_in.outer.late_layers import take_layers
from pfl_lightning.drop_in.outer.logs_over_clients import LogsOverClients
from pfl_lightning.errors import FederationError

__all__ = ["Given", "HoldsGivenModule"]


@dataclass(frozen=True)
class Given:
    """What was given; apart, so that it is no part of the federation's own state.

    Attributes:
        module: The author's module, which holds the global model in the end.
        first: A copy of it as it was.
        parts: Which of its layers the clients need.
        factory: Makes the module once more.
        frozen: Which of the frozen parameters never change.
        gained: Knows what the module has gained since it was copied.
    """

    module: L.LightningModule
    first: L.LightningModule
    parts: ClientParts
    factory: Factory | None
    frozen: Sequence[str] | None
    gained: Gained


class HoldsGivenModule(LogsOverClients):
    """Copies the module that was given, and gives it the global model."""

    _given: Given

    changes: Changes
    """What the author changes in the module between calls of a Trainer."""

    @property
    def given_module(self) -> L.LightningModule:
        """The module that was given."""
        return self._given.module

    @property
    def _gained(self) -> Gained:
        """What the module has gained since it was copied."""
        return self._given.gained

    def _first_once_more(self) -> L.LightningModule:
        """A copy of the module as it was when it was given."""
        return self._copied(self._given.first)

    def _copied(self, module: L.LightningModule) -> L.LightningModule:
        """A copy of the module, or of one that was made of it."""
        return copied(module, self._given.factory, self._shared_names())

    def _shared_names(self) -> frozenset[str]:
        """Names of the parameters whose memory copies of the first module share."""
        return frozen_parameters(self._given.first, self._given.frozen)

    # ------------------------------------------------------------------ the global model

    def global_model(self) -> L.LightningModule:
        """The model that the server would send, of the class that was given; it is the caller's.

        What never travels under the method has the values that it had before the first round.
        """
        if not self.is_set_up:
            raise FederationError("there is no global model before trainer.fit, validate or test has set it up")
        client = copy.deepcopy(self.clients.models[0])
        assert isinstance(client, ModuleClient)
        client.networks_as_given()
        module = client.exported_module()
        self.load_global(module)
        return module

    def load_global(self, module: nn.Module) -> None:
        """Load the model that the server would send into a copy of the module."""
        state = {**self.clients.first_state(0), **self.server.broadcast(0, self.round).weights}
        for prefix in NETWORKS:
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            load_plain_state(module, own)

    def fill_given_module(self) -> None:
        """Load the global model into the module that was given, with layers and attributes that ``setup`` has set."""
        model, given = self.global_model(), self._given.module
        self.trainer.precision_plugin.convert_module(given)  # as a plain fit does with "64-true" and "bf16-true"
        for name in self.local.added:
            put_layer(given, name, copy.deepcopy(model.get_submodule(name)))
        take_layers(given, model)
        self._gained.hand_back(model, given)
        load_plain_state(given, plain_state(model))
        self.changes.end(given)

    def look_for_changes(self) -> None:
        """A call of the Trainer begins: warn of what the module's author has changed since the last one."""
        given = self._given.module
        self.changes.begin(given, lambda: _stored_tensors(self.global_model()) if self.is_set_up else {})
        self.changes.warn(type(given).__name__, self.stage_name == "fit")


def _stored_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers."""
    found: dict[str, Tensor] = dict(module.named_parameters())
    for name, layer in module.named_modules():
        kept = [n for n in layer._buffers if n not in layer._non_persistent_buffers_set]
        found |= {f"{name}.{n}".removeprefix("."): b for n in kept if (b := layer._buffers[n]) is not None}
    return found
