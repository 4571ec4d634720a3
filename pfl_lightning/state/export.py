"""Clients' models as plain files, to be loaded without this package."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from pfl_lightning.errors import FederationError
from pfl_lightning.federation import Federation

__all__ = ["export_clients"]


def export_clients(federation: Federation, folder: str | Path, clients: Iterable[int] | None = None) -> list[Path]:
    """Write every client's own model as a plain state_dict, and beside it what it is.

    A client's model is what it is evaluated with, fine-tuned if the method does so before an evaluation. It is written
    to ``client_<number>.pt``, which ``torch.load(path, weights_only=True)`` reads; ``client_<number>.json`` names the
    method, the round, the client and the class of the model. In a federation of a LightningModule of one's own the
    names are those of the module, so that its ``load_state_dict`` takes them; otherwise they are ``encoder.*``,
    ``head.*`` and those of what else the method predicts with.

    Args:
        federation: It has been fitted, or has loaded a checkpoint.
        folder: Where the files go; made if it is not there.
        clients: Numbers of clients; ``None`` for all.

    Returns:
        The files with the models.

    Raises:
        FederationError: The federation has not been fitted or evaluated yet.
        IndexError: There is no such client.
    """
    if not federation.is_set_up:
        raise FederationError("there are no clients before trainer.fit, validate or test has set the federation up")
    target, written = Path(folder), []
    for client in range(federation.num_clients) if clients is None else clients:
        model = federation.client_model(client)
        names = federation.clients.model_of(client).exported_names()
        state = model.state_dict()
        target.mkdir(parents=True, exist_ok=True)
        path = target / f"client_{client:0{len(str(federation.num_clients - 1))}d}.pt"
        temporary = path.with_suffix(".tmp")
        torch.save({name: state[name].cpu().clone() for name in names}, temporary)
        os.replace(temporary, path)
        about = {
            "method": federation.method_name,
            "round": federation.round,
            "client": client,
            "model": federation.clients.labels[federation.clients.architecture_of[client]],
        }
        path.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n")
        written.append(path)
    return written
