"""Every client's own model, as it would be evaluated now: for evaluations, as plain files and for whoever asks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import lightning as L
import torch

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData
from pfl_lightning.engines import EvaluationTask
from pfl_lightning.engines.lifecycle import forget_preparation, load_own_state, make_context
from pfl_lightning.errors import FederationError
from pfl_lightning.federation.evaluation import warn_if_not_finetuned
from pfl_lightning.messages import Broadcast
from pfl_lightning.phases import Phase
from pfl_lightning.server import no_broadcast
from pfl_lightning.state.closures import copy_module
from pfl_lightning.state.files import replace_file

if TYPE_CHECKING:
    from pfl_lightning.federation.federation import Federation

__all__ = ["client_model", "client_models", "evaluation_task", "export_clients"]


def evaluation_task(
    federation: Federation, client: int, *, validation: bool = False, test: bool = False
) -> EvaluationTask:
    """The client's own model after the last round, and the parts to evaluate it on."""
    data, clients, server = federation.data, federation.clients, federation.server
    parts, model = data.client_data(client), clients.model_of(client)
    trained = clients.keeps_trained(client)
    make_broadcast = (server.idle_broadcast if trained else None) or server.broadcast
    broadcast = make_broadcast(client=client, round=federation.round)
    if not isinstance(broadcast, Broadcast):
        raise no_broadcast(server, broadcast)
    stored, environment = clients.personal.written(client), federation.environment
    return EvaluationTask(
        make_context(data, client, federation.round, model, environment, training=False, stored=stored),
        broadcast,
        clients.stored(client),
        trained,
        parts.validation if validation else None,
        parts.test if test else None,
        clients.attributes(client),
    )


def client_model(federation: Federation, client: int) -> L.LightningModule:
    """A copy of a client's own model, fine-tuned if the method does so before an evaluation.

    Inside of ``personalized`` it is the model of the personalization: its new head, say, on the client's encoder. It is
    a :class:`~pfl_lightning.client.FederatedClient`; in a federation of a user's LightningModule, it is of that
    module's class.

    Raises:
        FederationError: The federation has not been fitted or evaluated yet.
        IndexError: There is no such client.
    """
    _check_is_set_up(federation)
    if not 0 <= client < federation.num_clients:
        raise IndexError(f"there is no client {client}; clients are 0 to {federation.num_clients - 1}")
    clients, environment = federation.clients, federation.environment
    model, task = clients.model_of(client), federation.evaluation_task(client)
    threads = federation.engine.holding_threads(clients.models, federation.data, environment)
    with torch.inference_mode(False), torch.no_grad(), threads:
        stage = federation._stage or federation.new_stage()
        try:
            if stage is not None:
                model, task = stage.prepare(client, task)
            warn_if_not_finetuned(federation.engine.load_own_model(model, task, environment))
        finally:
            if stage is not None and stage is not federation._stage:
                stage.close()
    own = copy_module(model)
    forget_preparation(model)
    own.phase = Phase(losses=own.exported_losses)
    return own.exported_module()


def _check_is_set_up(federation: Federation) -> None:
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


# ---------------------------------------------------------------------- plain files


def exported_clients(federation: Federation, clients: Iterable[int] | None) -> Iterator[tuple[int, str]]:
    """Clients that are exported, and the name of each one's file or folder, such as ``client_03``.

    Args:
        federation: A federation that has been fitted, or has loaded a checkpoint.
        clients: Numbers of clients; ``None`` for all.

    Raises:
        FederationError: The federation has not been fitted or evaluated yet.
    """
    _check_is_set_up(federation)
    width = len(str(federation.num_clients - 1))
    for client in range(federation.num_clients) if clients is None else clients:
        yield client, f"client_{client:0{width}d}"


def export_clients(federation: Federation, folder: str | Path, clients: Iterable[int] | None = None) -> list[Path]:
    """Write every client's model as a plain state_dict, with a description next to it.

    A client's model is the one it is evaluated with, fine-tuned if the method does so before an evaluation, and
    personalized inside of ``federation.personalized(...)``. It is written to ``client_<number>.pt``, which
    ``torch.load(path, weights_only=True)`` reads; ``client_<number>.json`` names the method, the round, the client and
    the class of the model, ``mean`` and ``std`` by which each channel of its inputs is normalized (of values in [0, 1]
    where the data are unsigned bytes; ``null`` for none), and the ``classes`` in the order of the outputs (``null``
    where they are not known, or no head was trained). In a federation of a user-defined LightningModule the names are
    those of the module, so that its ``load_state_dict`` takes them. Otherwise they are ``encoder.*``, ``head.*`` and
    those of further modules that the method predicts with.

    Args:
        federation: A federation that has been fitted, or has loaded a checkpoint.
        folder: Folder of the files; made if it does not exist.
        clients: Numbers of clients; ``None`` for all.

    Returns:
        Paths of the files with the models.

    Raises:
        FederationError: The federation has not been fitted or evaluated yet.
        IndexError: There is no such client.
    """
    target, written = Path(folder), []
    for client, name in exported_clients(federation, clients):
        model = federation.client_model(client)
        own = model if isinstance(model, FederatedClient) else federation.clients.model_of(client)
        names, label = own.exported_names(), own.exported_label
        has_head = not own.uses_knn_evaluation()
        if not has_head:
            warnings.warn(
                f"{federation.method_name} trains no head: head.* in the exported models is as it was drawn, and "
                "encoder.* is what was trained; export personalized clients for models that predict (--personalize)",
                stacklevel=2,
            )
        named = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
        state = {**model.state_dict(), **dict(named)}  # a module's author may let its state_dict leave some out
        path = target / f"{name}.pt"
        with replace_file(path) as temporary, temporary.open("wb") as file:
            torch.save({name: state[name].detach().cpu().clone() for name in names}, file)
        about = {
            "method": federation.method_name,
            "round": federation.round + 1 if federation.has_trained else 0,
            "client": client,
            "model": label or federation.clients.labels[federation.clients.architecture_of[client]],
            **_about_data(federation.data, client, has_head),
        }
        with replace_file(path.with_suffix(".json")) as temporary:
            temporary.write_text(json.dumps(about, indent=2) + "\n")
        written.append(path)
    return written


def _about_data(data: FederatedData, client: int, has_head: bool) -> dict[str, list[float] | list[str] | None]:
    """Normalization of inputs, and meaning of outputs: who loads the file elsewhere has no data module."""
    transform = getattr(data, "transform", None)  # a user-defined data module may have none
    mean, std = (getattr(transform, name, None) for name in ("mean", "std"))
    names = getattr(data, "class_names", None) if data.num_classes and has_head else None
    seen_by = getattr(getattr(data, "partition", None), "client_view", None)  # of a rule of the package's
    view = seen_by(client, data.num_classes) if names is not None and seen_by is not None else None
    if view is not None and view.label_map is not None:  # the client's outputs are in an order of its own
        own = dict(zip(view.label_map, names or (), strict=True))
        names = [own[number] for number in sorted(own)]
    return {
        "mean": None if mean is None else list(mean),
        "std": None if std is None else list(std),
        "classes": None if names is None else list(names),
    }
