"""Every client trains alone: what a federation must beat."""

from __future__ import annotations

from pfl_lightning.client import FederatedClient


class LocalOnly(FederatedClient):
    """Nothing is shared; the whole model is personal."""

    model_agnostic = True
    shared = ()
    batch_norm = "own"
    eval_model = "trained"  # nothing is aggregated
