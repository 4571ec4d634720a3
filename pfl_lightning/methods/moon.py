"""MOON: model-contrastive federated learning."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.client import Batch, Citation, FederatedClient, FitContext
from pfl_lightning.functional.numerics import at_least_single, unit_rows
from pfl_lightning.messages import ClientUpdate
from pfl_lightning.methods._frozen_copy import FrozenCopy
from pfl_lightning.options import ClientOptions, Unpack


class MOON(FederatedClient):
    """FedAvg with a contrastive term between models, which pulls local representations towards the global model's.

    A sample's representation z is compared with those that the received model and the client's own model of its last
    fit give of the same sample: z shall be close to the former and far from the latter.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        mu: Weight of the contrastive term; 0 is FedAvg on the same network.
        temperature: tau of the contrastive term.
        projection: Width of the projection between encoder and head (Linear - ReLU - Linear), whose output is z;
            ``None`` for no projection: z are the features.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation("Model-Contrastive Federated Learning", "Li et al.", "CVPR", 2021)
    shared: tuple[str, ...] = ("encoder.*", "projection.*", "head.*")
    batch_norm = "shared"
    averages_samples = True
    loss_names = ("cross_entropy", "contrastive")
    personalization_losses = ("cross_entropy",)
    not_exported = ("previous.*", "has_previous")

    has_previous: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        mu: float = 5.0,
        temperature: float = 0.5,
        projection: int | None = 256,
        **options: Unpack[ClientOptions],
    ) -> None:
        check_number("mu", mu)
        check_number("temperature (tau)", temperature, strict=True)
        check_at_least("projection", projection, 1, optional=True)
        self._width = projection
        super().__init__(encoder, num_classes, **options)
        self.mu, self.temperature = mu, temperature
        if projection is None:
            self.shared = ("encoder.*", "head.*")
        self.received = FrozenCopy(self.encoder, self.projection, persistent=False)  # w^t, for the time of a fit
        self.previous = FrozenCopy(self.encoder, self.projection, persistent=True)  # w_i^(t-1), the client's own
        # What is frozen is the same in both copies: the module holds it once for all clients.
        self.frozen |= {f"previous.networks.0.{n.removeprefix('encoder.')}" for n in self.frozen}
        self.register_buffer("has_previous", torch.zeros((), dtype=torch.int64))  # 1 after the client's first fit

    def assemble(self, encoder: nn.Module) -> None:
        """Encoder, projection and head."""
        self.encoder = encoder
        width: int = encoder.out_features  # type: ignore[assignment]
        out = self._width
        self.projection = (
            nn.Identity() if out is None else nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out))
        )
        self.head = nn.Linear(width if out is None else out, self.num_classes)

    def before_fit(self, context: FitContext) -> None:
        """Keep the received model as it is, for z_glob."""
        self.received.take_over(self.encoder, self.projection)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The cross entropy, and mu times the contrastive term once the client has a model of its own (3)."""
        inputs, labels = batch
        z = self.projection(self.encode(inputs))
        terms = {}
        if self.uses("cross_entropy"):
            terms["cross_entropy"] = F.cross_entropy(self.head(z), labels)
        if self.uses("contrastive"):
            contrast = model_contrastive_loss(z, self.received(inputs), self.previous(inputs), self.temperature)
            terms["contrastive"] = self.mu * self.has_previous * contrast
        return self.sum_of_terms(terms)

    def classify(self, features: Tensor) -> Tensor:
        """Class scores (N, C) of the head on the projection."""
        scores: Tensor = self.head(self.projection(features))
        return scores

    def representations(self, features: Tensor) -> dict[str, Tensor]:
        """The features, and their projection z."""
        return {"features": features, "projection": self.projection(features)}

    def make_update(self, context: FitContext, before: None) -> ClientUpdate:
        """The trained model, which the client also keeps for its next fit, w_i^(t-1)."""
        self.previous.take_over(self.encoder, self.projection)
        self.has_previous.fill_(1)
        return super().make_update(context, before)


def model_contrastive_loss(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    """Mean of -log(e^(cos(z, z_glob) / tau) / (e^(cos(z, z_glob) / tau) + e^(cos(z, z_prev) / tau))) (2).

    Args:
        z: Representations of the samples, (N, d).
        z_global: Those of the global model, (N, d).
        z_previous: Those of the client's own previous model, (N, d).
        temperature: tau.

    Example:
        >>> import torch
        >>> from pfl_lightning.methods.moon import model_contrastive_loss
        >>> z, same, opposite = (torch.tensor([[1.0, 0.0]]) * factor for factor in (1, 3, -2))
        >>> model_contrastive_loss(z, same, same, 0.5)  # log 2
        tensor(0.6931)
        >>> model_contrastive_loss(z, same, opposite, 0.5)  # log(1 + e^-4)
        tensor(0.0181)
    """
    unit, towards, away = (unit_rows(at_least_single(rows)) for rows in (z, z_global, z_previous))
    # As the logarithm of one plus an exponential, which does not overflow for any temperature.
    return F.softplus(((unit * away).sum(-1) - (unit * towards).sum(-1)) / temperature).mean()
