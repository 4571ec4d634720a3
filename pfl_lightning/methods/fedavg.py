"""FedAvg, and FedAvg-FT with ``fine_tune="head"`` or ``"all"``."""

from __future__ import annotations

from pfl_lightning.client import Citation, FederatedClient


class FedAvg(FederatedClient):
    """One global model: the mean of the clients' models, weighted by samples (Algorithm 1).

    With ``fine_tune`` each client adapts a copy of the global model to its own data before it is evaluated (FedAvg-FT).
    """

    citation = Citation(
        "Communication-Efficient Learning of Deep Networks from Decentralized Data", "McMahan et al.", "AISTATS", 2017
    )
    model_agnostic = True
    batch_norm = "shared"
