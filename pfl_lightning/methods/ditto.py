"""Ditto."""

from __future__ import annotations

from torch import Tensor, nn

from pfl_lightning.checks import check_at_least, check_learning_rate, check_number
from pfl_lightning.client import Citation, FederatedClient, Phase
from pfl_lightning.functional import proximal_term
from pfl_lightning.options import ClientOptions, Unpack


class Ditto(FederatedClient):
    """A global model as in FedAvg, and a personal model on every client, held near the global one.

    The personal model is what is evaluated. It trains first, while the global model is still as it was received; what
    a client uploads does not depend on it.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        lam: lambda, how strongly the personal model is held to the global one; 0 is local training.
        personal_epochs: Local epochs of the personal model; ``None`` takes ``epochs``, which are the global model's.
        personal_lr: Its learning rate; ``None`` takes ``lr``.
        by_samples: Whether the server weighs clients by their numbers of samples; otherwise all count the same, as in
            the published code.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation("Ditto: Fair and Robust Federated Learning Through Personalization", "Li et al.", "ICML", 2021)
    model_agnostic = True
    shared = ("global_model.*",)
    batch_norm = "shared"
    averages_samples = True
    loss_names = ("cross_entropy", "proximal")
    personalization_losses = ("cross_entropy",)
    not_exported = ("global_model.*",)

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        lam: float = 0.1,
        personal_epochs: int | None = None,
        personal_lr: float | None = None,
        by_samples: bool = True,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("lam (lambda)", lam)
        check_at_least("personal_epochs", personal_epochs, 1, optional=True)
        check_learning_rate("personal_lr", personal_lr, optional=True)
        self.lam, self.personal_lr, self.by_samples = lam, personal_lr, by_samples
        self.personal_epochs = self.epochs if personal_epochs is None else personal_epochs
        self.global_model = self.copy_network()
        self.frozen |= self.find_frozen(self.global_model)

    def active_network(self) -> nn.Module | None:
        """The global model where it alone trains; otherwise the personal one."""
        return self.global_model if self.training and self.phase.trains_only("global_model") else None

    def phases(self) -> tuple[Phase, ...]:
        """Algorithm 1, v_k before w (there after it): neither depends on the other, and w^t is still at hand."""
        return (
            Phase("personal", ("encoder.*", "head.*"), self.personal_epochs, self.personal_lr),
            Phase("global", ("global_model.*",), self.epochs, losses=("cross_entropy",)),
        )

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """F_k(w) of the global model; h_k(v_k; w^t) = F_k(v_k) + lambda / 2 ||v_k - w^t||^2 of the personal."""
        terms = super().loss_terms(features, labels)
        if self.uses("proximal"):
            reference = dict(self.global_model.named_parameters())  # w^t: it trains in the phase after this one
            own = self.network_parameters()
            distance = proximal_term(own, {name: reference[name].detach() for name in own})
            terms["proximal"] = self.lam / 2 * distance
        return terms
