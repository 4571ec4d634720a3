"""Batches of one item, on which batch normalization cannot train: found before the first round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from pfl_lightning.client import FederatedClient, Phase
from pfl_lightning.data import FederatedData
from pfl_lightning.engines.advice import SINGLE_ITEM
from pfl_lightning.engines.lifecycle import enter_phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.notices import named_clients
from pfl_lightning.state.clients import Clients
from pfl_lightning.state.closures import copy_module

__all__ = ["check_single_items"]

Found = tuple[int, int, int]
"""A client, its number of training items and its batch size."""


def check_single_items(clients: Clients, data: FederatedData) -> None:
    """Refuse clients with a training batch of one item where batch normalization needs two, before the first round.

    It needs two where an item gives one value for each channel. Left to the fits are loaders whose batches only they
    know, and modules that do not run on a batch's inputs alone.

    Raises:
        ConfigurationError: Names the clients and what helps.
    """
    for number, model in enumerate(clients.models):
        if model.views > 1 or not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules()):
            continue
        own = [client for client in data.participating if clients.architecture_of[client] == number]
        for phase in model.phases():
            sizes = [_sizes(model, data, client, phase) for client in own]
            found = [size[0] for size in sizes if size is not None and size[1]]
            if found and _needs_two(model, phase, data, found[0][0]):
                raise ConfigurationError(_advice(found, phase))


def _sizes(model: FederatedClient, data: FederatedData, client: int, phase: Phase) -> tuple[Found, bool] | None:
    """A client's items and batch size in a phase, and whether a batch has one item; None where nobody knows."""
    own: Any = data.client_data(client)
    part = own.train_and_unlabeled if model.uses_unlabeled_data and not phase.plain else own.train
    source, settings = getattr(part, "source", None), getattr(own, "batches", None) or data
    known = hasattr(part, "indices") if source is None else _reads_items(source)
    if not known or phase.source == "public" or not phase.epochs:
        return None
    count, size = len(part), phase.batch_size or settings.batch_size
    dropped = phase.plain or settings.drop_last or phase.smallest_batch > 1
    single = size == 1 or (count % size == 1 and ((count == 1 and not phase.plain) or (count > size and not dropped)))
    return (client, count, size), single


def _reads_items(source: Any) -> bool:
    """Whether items are read by their places, in batches of the size that is given."""
    return source.order is None and source.loader is None and source.by == "items"


def _advice(found: list[Found], phase: Phase) -> str:
    client, count, size = min(found, key=lambda one: one[1] > 1)  # one with a single item, where there is any
    return (
        f"{named_clients([number for number, _, _ in found])}: batch normalization cannot train on a batch of one item "
        f"in phase {phase.name!r}, and client {client} has {count} training item{'s' * (count > 1)} in batches of "
        f"{size}; {SINGLE_ITEM}"
    )


@torch.no_grad()
def _needs_two(model: FederatedClient, phase: Phase, data: FederatedData, client: int) -> bool:
    """Whether an item gives some normalization layer that trains in the phase one value for each channel."""
    tried, seen = copy_module(model), list[bool]()
    tried.train()
    enter_phase(tried, phase)

    def see(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if layer.training and arguments and isinstance(arguments[0], Tensor):
            seen.append(arguments[0].numel() == len(arguments[0]) * arguments[0].shape[1])

    inside = {id(layer) for layer in tried.encoder.modules()}
    for layer in tried.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.register_forward_pre_hook(see)
            if tried.step_module is tried and id(layer) not in inside and isinstance(layer, nn.BatchNorm1d):
                seen.append(layer.training)  # in a projector, which takes features
    try:
        with isolate_rng():
            for batch in _batch(data, client):
                tried.encoder(batch[0] if isinstance(batch, tuple | list) else batch)
    except Exception as error:  # of a network that takes something else than the inputs: the fit tells
        return any(seen) or "Expected more than 1 value per channel" in str(error)
    return any(seen)


def _batch(data: FederatedData, client: int) -> Iterator[Any]:
    for batch in data.client_data(client).train.loader(2):
        yield batch
        return
