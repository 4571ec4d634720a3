"""Export of clients' models as plain files, which load without this package."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData
from pfl_lightning.errors import FederationError
from pfl_lightning.federation import Federation
from pfl_lightning.state.files import replace_file

__all__ = ["export_clients", "exported_clients"]


def exported_clients(federation: Federation, clients: Iterable[int] | None) -> Iterator[tuple[int, str]]:
    """Clients that are exported, and the name of each one's file or folder, such as ``client_03``.

    Args:
        federation: A federation that has been fitted, or has loaded a checkpoint.
        clients: Numbers of clients; ``None`` for all.

    Raises:
        FederationError: The federation has not been fitted or evaluated yet.
    """
    if not federation.is_set_up:
        raise FederationError("there are no clients before trainer.fit, validate or test has set the federation up")
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
        state = {**model.state_dict(), **_tensors(model)}  # a module's author may let its state_dict leave some out
        path = target / f"{name}.pt"
        with replace_file(path) as temporary, temporary.open("wb") as file:
            torch.save({name: state[name].cpu().clone() for name in names}, file)
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


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, by name."""
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for each in named for name, tensor in each}


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
