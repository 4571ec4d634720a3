"""LG-FedAvg."""

from __future__ import annotations

from pfl_lightning.client import Citation, FederatedClient


class LGFedAvg(FederatedClient):
    """The encoder is personal (local representations), the head is averaged (global)."""

    citation = Citation(
        "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
        "Liang et al.",
        "arXiv",
        2020,
    )
    model_agnostic = True
    shared = ("head.*",)
    batch_norm = "own"
