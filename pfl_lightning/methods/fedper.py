"""FedPer."""

from __future__ import annotations

from pfl_lightning.client import Citation, FederatedClient


class FedPer(FederatedClient):
    """The encoder is averaged, the head is personal; both train together (base and personalization layers)."""

    citation = Citation("Federated Learning with Personalization Layers", "Arivazhagan et al.", "arXiv", 2019)
    model_agnostic = True
    shared = ("encoder.*",)
    batch_norm = "shared"
