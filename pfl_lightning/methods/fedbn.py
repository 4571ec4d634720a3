"""FedBN."""

from __future__ import annotations

import warnings

from torch import nn

from pfl_lightning.client import Citation, FederatedClient
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.state.tensors import norm_names


class FedBN(FederatedClient):
    """FedAvg in which batch normalization stays on the client: its weights, biases and running statistics.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; without batch normalization the method is FedAvg.
        num_classes: Number of classes, C.
        by_samples: Whether the server weighs clients by their numbers of samples; otherwise all count the same, as in
            the published code.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", "Li et al.", "ICLR", 2021
    )
    model_agnostic = True
    batch_norm = "own"

    def __init__(
        self, encoder: nn.Module, num_classes: int, *, by_samples: bool = True, **options: Unpack[ClientOptions]
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        self.by_samples = by_samples
        if not norm_names(self, affine=True):
            warnings.warn(f"{type(encoder).__name__} has no batch normalization: FedBN equals FedAvg", stacklevel=2)
