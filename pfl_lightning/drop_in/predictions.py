"""Predictions of each client's own model, and a warning where the global model's are made with untrained parts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import lightning as L
from torch import nn

from pfl_lightning.data import names_of
from pfl_lightning.datamodules.adapters.stages import brings, gives
from pfl_lightning.drop_in.outer.traveling import outline
from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.federation import Federation
from pfl_lightning.federation.predictions import trainer_predict
from pfl_lightning.notices import named_clients
from pfl_lightning.state.checkpoints import FEDERATION, read_checkpoint
from pfl_lightning.state.equality import same


def predict_clients(
    federation: Federation,
    dataloaders: Any = None,
    *,
    clients: Iterable[int] | None = None,
    trainer: L.Trainer | None = None,
) -> dict[int, list[Any]]:
    """Predict with each client's own model, fine-tuned if the method does so before an evaluation.

    Example:
        >>> loop = FederatedLoop(method=FedPer, num_clients=10)  # doctest: +SKIP
        >>> L.Trainer(max_epochs=5, callbacks=[loop]).fit(Net(), datamodule=data)  # doctest: +SKIP
        >>> found = predict_clients(loop.federation, loader)  # doctest: +SKIP
        >>> torch.cat(found[3])  # of client 3  # doctest: +SKIP

    Args:
        federation: A federation that was fitted, or evaluated from a checkpoint: ``loop.federation``, or the first of
            what :func:`~pfl_lightning.federate` returned.
        dataloaders: Loaders for every client, as ``trainer.predict`` takes them; or a dictionary with those of each
            client, by its number. ``None`` is the ``predict_dataloader`` of the client's data module: its own, where
            clients have their own, or the whole of the project's.
        clients: Numbers of the clients; ``None`` is all of them, or those of the dictionary.
        trainer: Runs the predictions; ``None`` is a Trainer like that of the federation, without loggers and callbacks.

    Returns:
        What ``trainer.predict`` gives for each client, by the number of the client.

    Raises:
        ConfigurationError: There is nothing to predict.
        IndexError: There is no such client.
    """
    own = isinstance(dataloaders, Mapping) and all(isinstance(key, int) for key in dataloaders)
    if clients is None:
        clients = dataloaders if own else range(federation.num_clients if federation.is_set_up else 1)
    found = {}
    for client in clients:
        model = federation.client_model(client)
        if own and client not in dataloaders:
            raise ConfigurationError(f"dataloaders has no entry for client {client}; it has {list(dataloaders)}")
        given: dict[str, Any] = {"dataloaders": dataloaders[client] if own else dataloaders}
        if dataloaders is None:
            datamodule = getattr(federation.data.client_data(client).train, "datamodule", None)
            is_given = datamodule is not None and gives(datamodule, "predict_dataloader")
            if not is_given and not brings(model, "predict_dataloader"):
                raise ConfigurationError(
                    f"{named_clients([client], names_of(federation.data))}: neither its data module nor "
                    f"{type(model).__name__} has a predict_dataloader: "
                    "call predict_clients(federation, dataloaders)"
                )
            given = {"datamodule": datamodule} if is_given else {}
        found[client] = trainer_predict(model, federation, trainer, **given)
    return found


class NamesUnsharedParts(L.Callback):
    """Warns that the global model, with which a Trainer predicts, has parts that no client has trained.

    Args:
        federation: The federation that has trained it.
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Now the module holds what a checkpoint has given it."""
        warn_of_unshared_parts(pl_module, self._federation, trainer.ckpt_path)


def warn_of_unshared_parts(module: nn.Module, federation: Federation | None, ckpt_path: Any) -> None:
    """Warn of parts of the global model that no client has trained, and of those that are one client's.

    Args:
        module: The module that predicts. One that holds something else in these parts, as a client's model does, is
            left alone.
        federation: The federation that has trained it; ``None`` for none.
        ckpt_path: The checkpoint that was loaded into the module; ``None`` for none.
    """
    if federation is not None and _is_one_clients(module, federation):
        warnings.warn(
            f"{federation.method_name} sends each client weights of its own, and trainer.predict uses those of the "
            "first client: pfl_lightning.predict_clients(federation, dataloaders) uses each client's own model",
            stacklevel=2,
        )
    first = dict[str, Any]()
    if ckpt_path is not None:
        with suppress(CheckpointError):  # a file of something else
            content = read_checkpoint(ckpt_path, weights_only=True).get(FEDERATION, {}).get("_extra_state", {})
            if content.get("has_trained"):
                first = {**content["fixed"][0], **content["personal"]["stores"][0]["initial"]}
    elif federation is not None and federation.is_set_up and federation.has_trained:
        first = federation.clients.first_state(0)
    own = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    kept = {name: first[f"module.{name}"] for name in own if f"module.{name}" in first}
    missing = [f"module.{name}" for name, value in kept.items() if same(own[name].to(value), value)]
    if not missing:
        return
    name, parts = type(module).__name__, outline(missing, [f"module.{name}" for name in own])
    warnings.warn(
        f"trainer.predict uses the global model of {name}, but clients do not share {parts}: it has its initial values "
        "there, which no client has trained. pfl_lightning.predict_clients(federation, dataloaders) predicts with each "
        "client's own model (the federation is FederatedLoop(...).federation), and federation.client_model(k) is that "
        "of client k",
        stacklevel=2,
    )


def _is_one_clients(module: nn.Module, federation: Federation) -> bool:
    """Whether a module has weights that the server would send to the first client, and not to the last."""
    if not federation.is_set_up or not federation.has_trained:
        return False
    clients = (0, federation.data.participating[-1])
    first, last = (federation.server.broadcast(client, federation.round).weights for client in clients)
    differing = {name: value for name, value in first.items() if not same(value, last[name])}
    own = {f"module.{name}": parameter.detach() for name, parameter in module.named_parameters()}
    return any(name in own and same(own[name].to(value), value) for name, value in differing.items())
