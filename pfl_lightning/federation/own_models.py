"""Every client's own model, as it would be evaluated now: for evaluations and for whoever asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import lightning as L
import torch

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import client_number, names_of
from pfl_lightning.engines import EvaluationTask
from pfl_lightning.engines.lifecycle import forget_preparation, load_own_state, make_context
from pfl_lightning.errors import FederationError
from pfl_lightning.federation.evaluation import warn_if_not_finetuned
from pfl_lightning.messages import Broadcast
from pfl_lightning.phases import Phase
from pfl_lightning.server import no_broadcast
from pfl_lightning.state.closures import copy_module

if TYPE_CHECKING:
    from pfl_lightning.federation.federation import Federation

__all__ = ["client_model", "client_models", "evaluation_task"]


def evaluation_task(
    federation: Federation, client: int, *, validation: bool = False, test: bool = False
) -> EvaluationTask:
    """The client's own model after the last round, and the parts to evaluate it on."""
    data, clients, server = federation.data, federation.clients, federation.server
    parts, (model, state) = data.client_data(client), clients.model_and_state(client)
    stored, environment = clients.personal.written(client), federation.environment
    trained = stored and model.eval_model == "trained"  # then the store holds the whole model
    make_broadcast = (server.idle_broadcast if trained else None) or server.broadcast
    broadcast = make_broadcast(client=client, round=federation.round)
    if not isinstance(broadcast, Broadcast):
        raise no_broadcast(server, broadcast)
    return EvaluationTask(
        make_context(data, client, federation.round, model, environment, training=False, stored=stored),
        broadcast,
        state,
        trained,
        parts.validation if validation else None,
        parts.test if test else None,
        clients.attributes(client),
    )


def client_model(federation: Federation, client: int | str) -> L.LightningModule:
    """A copy of a client's own model, fine-tuned if the method does so before an evaluation.

    Inside of ``personalized`` it is the model of the personalization: its new head, say, on the client's encoder. It is
    a :class:`~pfl_lightning.client.FederatedClient`; in a federation of a user's LightningModule, it is of that
    module's class.

    Args:
        federation: The federation.
        client: The client's number, or its name where the data have names.

    Raises:
        FederationError: The federation has not been fitted or evaluated yet.
        NoSuchClientError: There is no such client.
    """
    check_is_set_up(federation)
    client = client_number(federation.data, client)
    clients, environment = federation.clients, federation.environment
    model, task = clients.model_of(client), federation.evaluation_task(client)
    threads = federation.engine.holding_threads(clients.models, federation.data, environment)
    with torch.inference_mode(False), torch.no_grad(), threads:
        stage = federation._stage or federation.new_stage()
        try:
            if stage is not None:
                model, task = stage.prepare(client, task)
            warn_if_not_finetuned(federation.engine.load_own_model(model, task, environment), names_of(federation.data))
        finally:
            if stage is not None and stage is not federation._stage:
                stage.close()
    own = copy_module(model)
    forget_preparation(model)
    own.phase = Phase(losses=own.exported_losses or own.personalization_losses)
    return own.exported_module()


def check_is_set_up(federation: Federation) -> None:
    """Refuse a federation that has no clients yet."""
    if not federation.is_set_up:
        raise FederationError("there are no clients before trainer.fit, validate or test has set the federation up")


def client_models(federation: Federation, clients: Iterable[int]) -> Iterator[tuple[int, FederatedClient]]:
    """The model that each client is evaluated with, before any fine-tuning, for inspection.

    The models stand, one after the other, in copies of the architectures' modules, so that the training goes on
    undisturbed.

    Yields:
        The client's number and its model in evaluation mode, which is valid until the next is asked for.
    """
    copies: dict[int, FederatedClient] = {}
    for client in clients:
        own = federation.clients.model_of(client)
        if id(own) not in copies:
            copies[id(own)] = copy_module(own)
        model = copies[id(own)]
        load_own_state(model, federation.evaluation_task(client), federation.environment)
        yield client, model.inspected_module().eval()
