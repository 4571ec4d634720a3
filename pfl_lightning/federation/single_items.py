"""Batches of one item, on which batch normalization cannot train: found before the first round."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.nn.modules.batchnorm import BatchNorm1d, _BatchNorm

from pfl_lightning.client import FederatedClient, Phase
from pfl_lightning.data import FederatedData
from pfl_lightning.engines.advice import SINGLE_ITEM
from pfl_lightning.engines.lifecycle import enter_phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.notices import named_clients
from pfl_lightning.state.clients import Clients
from pfl_lightning.state.closures import copy_module


def check_single_items(clients: Clients, data: FederatedData) -> None:
    """Refuse clients with a training batch of one item where batch normalization needs two, before the first round.

    It needs two where an item gives one value for each channel. Left to the fits are loaders whose batches only they
    know, and modules that do not run on a batch's inputs alone.

    Raises:
        ConfigurationError: Names the clients and what helps.
    """
    for number, model in enumerate(clients.models):
        if model.views > 1 or not any(isinstance(layer, _BatchNorm) for layer in model.modules()):
            continue
        own = [client for client in data.participating if clients.architecture_of[client] == number]
        for phase in model.phases():
            sizes = {client: _single(model, data, client, phase) for client in own}
            found = {client: size for client, size in sizes.items() if size is not None}
            if found and _needs_two(model, phase, data, next(iter(found))):
                client, (count, size) = next(iter(found.items()))
                raise ConfigurationError(
                    f"{named_clients(list(found))}: batch normalization cannot train on a batch of one item in phase "
                    f"{phase.name!r}, and client {client} has {count} training item{'s' * (count > 1)} in batches of "
                    f"{size}; {SINGLE_ITEM}"
                )


def _single(model: FederatedClient, data: FederatedData, client: int, phase: Phase) -> tuple[int, int] | None:
    """A client's number of items and batch size, where a batch of the phase has one item; else ``None``."""
    own: Any = data.client_data(client)
    part = own.train_and_unlabeled if model.uses_unlabeled_data and not phase.plain else own.train
    source, settings = getattr(part, "source", None), getattr(own, "batches", None) or data
    known = hasattr(part, "indices")
    if source is not None:  # its items are read by their places, in batches of the size that is given, or nobody knows
        known = source.order is None and source.loader is None and source.by == "items"
    if not known or phase.source == "public" or not phase.epochs:
        return None
    count, size = len(part), phase.batch_size or settings.batch_size
    dropped = phase.plain or settings.drop_last or phase.smallest_batch > 1
    single = size == 1 or (count % size == 1 and ((count == 1 and not phase.plain) or (count > size and not dropped)))
    return (count, size) if single else None


@torch.no_grad()
def _needs_two(model: FederatedClient, phase: Phase, data: FederatedData, client: int) -> bool:
    """Whether a layer that trains in the phase refuses one item: the encoder on it, or one behind, of features."""
    tried = copy_module(model)
    tried.train()
    enter_phase(tried, phase)
    inside = {id(layer) for layer in tried.encoder.modules()}
    behind = [layer for layer in tried.modules() if isinstance(layer, BatchNorm1d) and id(layer) not in inside]
    try:
        with isolate_rng():
            batch: Any = next(iter(data.client_data(client).train.loader(1)))
            tried.encoder(batch[0] if isinstance(batch, tuple | list) else batch)
    except Exception as error:  # of a network that takes something else than the inputs: the fit tells
        if str(error).startswith("Expected more than 1 value per channel"):
            return True
    return tried.step_module is tried and any(layer.training for layer in behind)
