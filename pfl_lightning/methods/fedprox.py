"""FedProx."""

from __future__ import annotations

from torch import Tensor, nn

from pfl_lightning.checks import check_number
from pfl_lightning.client import Citation, FederatedClient
from pfl_lightning.functional import proximal_term
from pfl_lightning.messages import Broadcast
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.state.tensors import TensorDict


class FedProx(FederatedClient):
    """FedAvg with a term that holds the local model near the global one.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        mu: Weight of the proximal term; 0 is FedAvg.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation("Federated Optimization in Heterogeneous Networks", "Li et al.", "MLSys", 2020)
    model_agnostic = True
    batch_norm = "shared"
    averages_samples = True
    loss_names = ("cross_entropy", "proximal")
    personalization_losses = ("cross_entropy",)

    def __init__(
        self, encoder: nn.Module, num_classes: int, *, mu: float = 0.01, **options: Unpack[ClientOptions]
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("mu", mu)
        self.mu = mu
        self.received = TensorDict(persistent=False)

    def receive(self, broadcast: Broadcast) -> None:
        """Keep the global model w^t for the proximal term."""
        super().receive(broadcast)
        # A copy in the memory layout of the parameters, which steps are quicker with.
        own = {name: p.detach().clone() for name, p in self.named_parameters() if name in broadcast.weights}
        self.received.assign(own)

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """h_k(w; w^t) = F_k(w) + mu / 2 ||w - w^t||^2  (2)."""
        terms = super().loss_terms(features, labels)
        if not self.uses("proximal"):
            return terms
        received = self.received.as_state()
        trained = {name: p for name, p in self.named_parameters() if name in received}
        distance = proximal_term(trained, {name: received[name] for name in trained})
        return {**terms, "proximal": self.mu / 2 * distance}
