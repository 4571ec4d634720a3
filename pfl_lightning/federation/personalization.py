"""Personalization stage after the training: every client adapts the trained model to its own data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import usual_augmentations
from pfl_lightning.engines import EvaluationTask
from pfl_lightning.engines.lifecycle import forget_preparation, load_own_state
from pfl_lightning.messages import Broadcast
from pfl_lightning.phases import Personalization
from pfl_lightning.seeding import Purpose, derive_seed, torch_seed

if TYPE_CHECKING:
    from pfl_lightning.federation.federation import Federation


class LinearProbe(FederatedClient):
    """A new linear head on the features of a trained encoder (Calibre, stage 2)."""

    feature_based = True
    shared: tuple[str, ...] = ()
    heads = ("head.*",)


class PersonalizationStage:
    """Gives the engine the modules and the tasks of an evaluation after a personalization.

    For a new head the modules are linear probes, one for each architecture, and a client's task brings the encoder
    that it would be evaluated with; all clients start from the same new head. One more probe is for clients that have
    never trained, where the method serves them with another network. Otherwise the modules are the method's own, which
    fine-tune as the personalization says until the stage is closed, or, where it adapts nothing, as they do without it.

    Args:
        personalization: What is trained, and how.
        federation: The federation, whose trained clients adapt.
    """

    def __init__(self, personalization: Personalization, federation: Federation) -> None:
        clients, environment = federation.clients, federation.environment
        convert = federation.trainer.precision_plugin.convert_module  # to the outer Trainer's precision
        for model in clients.models:
            model.check_personalization(personalization)
        self._settings, self._clients, self._environment = personalization, clients, environment
        self._new_head = personalization.new_head
        self._augmentations = (
            usual_augmentations(federation.data) if personalization.adapts and personalization.augment else ()
        )
        self._encoders: dict[int, dict[str, Tensor]] = {}
        self._stand_in: int | None = None  # the place of its probe
        self.modules: list[FederatedClient]
        if self._new_head:
            with torch_seed(derive_seed(environment.seed, Purpose.PERSONALIZE_HEAD)):
                probes = [model.with_new_head(LinearProbe) for model in clients.models]
                stand_in = clients.models[0].stand_in_with_new_head(LinearProbe)
            if stand_in is not None:
                self._stand_in = len(probes)
                probes.append(stand_in)
            device = clients.models[0].device
            self.modules = [cast(FederatedClient, convert(probe.to(device))) for probe in probes]
            self._heads = [
                {f"{probe.head_prefix}{name}": value.clone() for name, value in probe.head.state_dict().items()}
                for probe in self.modules
            ]
        else:
            self.modules = clients.models
        for module in self.modules if personalization.adapts else ():
            module.personalization = personalization

    def close(self) -> None:
        """Let the method's own modules fine-tune as they do without the stage."""
        for module in self.modules:
            module.personalization = None

    def prepare(self, client: int, task: EvaluationTask) -> tuple[FederatedClient, EvaluationTask]:
        """Return the module that the client is evaluated with, and its task.

        Args:
            client: Number of the client.
            task: The task without a personalization.
        """
        place = self._clients.architecture_of[client]
        if self._stand_in is not None and not task.context.stored:
            place = self._stand_in
        if self._new_head:
            state = {**self._encoder_of(client, task), **self._heads[place]}
            broadcast = Broadcast(client=client, round=task.context.round)
            task = replace(task, broadcast=broadcast, stored=state, trained=False)
        if self._augmentations:  # as make_context does it in a worker, for the module that trains
            data = task.context.data.with_plain_augmentations(self._augmentations)
            task = replace(task, context=replace(task.context, data=data))
        return self.modules[place], task

    def _encoder_of(self, client: int, task: EvaluationTask) -> dict[str, Tensor]:
        """Return the encoder that the client is evaluated with: the same tensors for all whose encoders are equal."""
        architecture, model = self._clients.architecture_of[client], self._clients.model_of(client)
        load_own_state(model, task, self._environment)
        state = model.encoder_state()
        known = self._encoders.get(architecture, {})
        same = known.keys() == state.keys() and all(torch.equal(known[name], value) for name, value in state.items())
        found = known if same else {name: value.clone() for name, value in state.items()}
        forget_preparation(model)
        self._encoders.setdefault(architecture, found)
        return found
