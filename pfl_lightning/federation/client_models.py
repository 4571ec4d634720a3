"""Every client's own model, as it would be evaluated now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import lightning as L
import torch

from pfl_lightning.client import FederatedClient
from pfl_lightning.engines import EvaluationTask
from pfl_lightning.engines.evaluation import forget_preparation, load_own_state
from pfl_lightning.engines.lifecycle import make_context
from pfl_lightning.errors import FederationError
from pfl_lightning.federation.evaluation import warn_if_not_finetuned
from pfl_lightning.federation.personalization import PersonalizationStage
from pfl_lightning.federation.rounds import FederationRounds
from pfl_lightning.messages import Broadcast
from pfl_lightning.phases import Personalization, Phase
from pfl_lightning.server import no_broadcast
from pfl_lightning.state.closures import copy_module

__all__ = ["ClientModels"]


class ClientModels(FederationRounds):
    """Gives the clients' models to evaluations, to exports and to whoever asks."""

    _personalization: Personalization | None
    _stage: PersonalizationStage | None

    def evaluation_task(self, client: int, *, validation: bool = False, test: bool = False) -> EvaluationTask:
        """Return the client's own model after the last round, and the parts to evaluate it on."""
        parts, model = self.data.client_data(client), self.clients.model_of(client)
        trained = self.clients.keeps_trained(client)
        make_broadcast = (self.server.idle_broadcast if trained else None) or self.server.broadcast
        broadcast = make_broadcast(client=client, round=self.round)
        if not isinstance(broadcast, Broadcast):
            raise no_broadcast(self.server, broadcast)
        stored = self.clients.personal.written(client)
        return EvaluationTask(
            make_context(self.data, client, self.round, model, self.environment, training=False, stored=stored),
            broadcast,
            self.clients.stored(client),
            trained,
            parts.validation if validation else None,
            parts.test if test else None,
            self.clients.attributes(client),
        )

    def client_model(self, client: int) -> L.LightningModule:
        """Return a copy of a client's own model, fine-tuned if the method does so before an evaluation.

        Inside of ``personalized`` it is the model of the personalization: its new head, say, on the client's encoder.

        It is a :class:`~pfl_lightning.client.FederatedClient`; in a federation of a user's LightningModule, it is of
        that module's class.

        Raises:
            FederationError: The federation has not been fitted or evaluated yet.
            IndexError: There is no such client.
        """
        if not self.is_set_up:
            raise FederationError("there are no clients before trainer.fit, validate or test has set the federation up")
        if not 0 <= client < self.num_clients:
            raise IndexError(f"there is no client {client}; clients are 0 to {self.num_clients - 1}")
        model, task = self.clients.model_of(client), self.evaluation_task(client)
        threads = self.engine.holding_threads(self.clients.models, self.data, self.environment)
        with torch.inference_mode(False), torch.no_grad(), threads, self._open_stage() as stage:
            if stage is not None:
                model, task = stage.prepare(client, task)
            warn_if_not_finetuned(self.engine.load_own_model(model, task, self.environment))
        own = copy_module(model)
        forget_preparation(model)
        own.phase = Phase(losses=own.exported_losses)
        return own.exported_module()

    @contextmanager
    def _open_stage(self) -> Iterator[PersonalizationStage | None]:
        """The stage of the test under way, or one for this time; ``None`` without a personalization."""
        if self._stage is not None or self._personalization is None:
            yield self._stage
            return
        convert = self.trainer.precision_plugin.convert_module
        stage = PersonalizationStage(self._personalization, self.clients, self.data, self.environment, convert)
        try:
            yield stage
        finally:
            stage.close()

    def client_models(self, clients: Iterable[int]) -> Iterator[tuple[int, FederatedClient]]:
        """Yield the model that each client is evaluated with, before any fine-tuning, for inspection.

        The models stand, one after the other, in copies of the architectures' modules, so that the training goes on
        undisturbed.

        Yields:
            The client's number and its model in evaluation mode, which is valid until the next is asked for.
        """
        copies: dict[int, FederatedClient] = {}
        for client in clients:
            own = self.clients.model_of(client)
            if id(own) not in copies:
                copies[id(own)] = copy_module(own)
            model = copies[id(own)]
            load_own_state(model, self.evaluation_task(client), self.environment)
            yield client, model.inspected_module().eval()
