"""GPFL: global and personalized feature information at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.functional.losses import square_term
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.messages import ClientUpdate
from pfl_lightning.options import ClientOptions, Unpack


class ConditionalValve(nn.Module):
    """Scales and shifts features as a condition says: relu((gamma + 1) * f + beta), gamma and beta of the condition.

    Args:
        width: Width d of features and conditions.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))
        self.beta = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        """Features (N, d) under a condition (d,)."""
        return F.relu((self.gamma(condition) + 1) * features + self.beta(condition))


class GPFL(FederatedClient):
    """A valve makes two of each feature vector: a global one, held to class embeddings, and one for a personal head.

    Encoder, valve and class embeddings are averaged; the head stays on the client. The valve (CoV) turns the same
    features into two, by two conditions: g, the mean of the class embeddings, and p_i, their mean weighted by the
    client's class shares. The head classifies those under p_i. Those under g are drawn to the embedding (GCE) of their
    class in angle, where they are told apart from the other classes, and in magnitude, towards the embedding that was
    received.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        magnitude_weight: lambda, the weight of the distance to the received embeddings.
        regularization: mu, the weight decay of valve and embeddings, as mu / 2 times their squared norm in the loss; it
            comes on top of ``weight_decay``.
        magnitude_norm: ``"batch"`` takes the norm of a batch's distances together (published implementation),
            ``"sample"`` the mean of the samples' norms (the paper).
        conditions_from: ``"received"`` makes both conditions of the received embeddings (the paper), ``"trained"`` of
            those that the client's own last fit ended with, and zero before its first (published implementation).
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized Federated Learning",
        "Zhang et al.",
        "ICCV",
        2023,
    )
    feature_based = True
    scores_features = True
    shared = ("encoder.*", "valve.*", "embeddings.*")
    batch_norm = "shared"
    paper_batch_size = 10
    loss_names = ("cross_entropy", "angle", "magnitude", "regularization")
    personalization_losses = ("cross_entropy",)
    not_exported = ("embeddings.weight",)

    conditions: Tensor
    received_embeddings: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        magnitude_weight: float = 0.01,
        regularization: float = 0.1,
        magnitude_norm: str = "batch",
        conditions_from: str = "received",
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("magnitude_weight (lambda)", magnitude_weight)
        check_number("regularization (mu)", regularization)
        check_choice("magnitude_norm", magnitude_norm, ("batch", "sample"))
        check_choice("conditions_from", conditions_from, ("received", "trained"))
        self.magnitude_weight, self.regularization = magnitude_weight, regularization
        self.magnitude_norm, self.conditions_from = magnitude_norm, conditions_from
        width = self.feature_width
        self.embeddings = nn.Embedding(num_classes, width)  # GCE
        self.valve = ConditionalValve(width)  # CoV
        self.register_buffer("conditions", torch.zeros(2, width))  # personal: g and p_i
        self.register_buffer("received_embeddings", torch.zeros(num_classes, width), persistent=False)

    # ------------------------------------------------------------------ conditions

    def before_fit(self, context: FitContext) -> None:
        """A copy of the received embeddings, and the conditions of this fit."""
        self.received_embeddings.copy_(self.embeddings.weight.detach())
        if self.conditions_from == "received":
            self._set_conditions(context)

    def make_update(self, context: FitContext, before: Any) -> ClientUpdate:
        """Encoder, valve and embeddings; in the other reading their conditions serve until the next fit."""
        if self.conditions_from == "trained":
            self._set_conditions(context)
        return super().make_update(context, before)

    def before_evaluation(self, context: FitContext) -> None:
        """The conditions of the received embeddings; where a trained model is evaluated, those that it trained with."""
        trained = self.eval_model == "trained" and bool(self.conditions.any())
        if self.conditions_from == "received" and not trained:
            self._set_conditions(context)

    @torch.no_grad()
    def _set_conditions(self, context: FitContext) -> None:
        """g, the mean of the embeddings, and p_i, their mean weighted by the client's class shares alpha_i."""
        embeddings = at_least_single(self.embeddings.weight)
        counts = self.count_classes(context).to(embeddings)
        shares = counts / counts.sum().clamp(min=1)
        personal = (shares[:, None] * embeddings).sum(dim=0)  # not a product of matrices, which half precision rounds
        self.conditions.copy_(torch.stack([embeddings.mean(dim=0), personal]))

    # ------------------------------------------------------------------ two routes

    def head_input(self, features: Tensor) -> Tensor:
        """f^P, the features under the client's own condition."""
        passed: Tensor = self.valve(features, self.conditions[1])
        return passed

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """L^P + L^alg + lambda L^mlg + mu / 2 (|V|^2 + |C|^2)."""
        terms = super().loss_terms(features, labels)  # L^P
        angle, magnitude = self.uses("angle"), self.uses("magnitude")
        if angle or magnitude:
            global_features = self.valve(features, self.conditions[0])  # f^G
        if angle:  # L^alg
            cosines = F.linear(F.normalize(global_features), F.normalize(self.embeddings.weight))
            terms["angle"] = F.cross_entropy(cosines, labels)
        if magnitude:  # L^mlg
            distances = global_features - self.received_embeddings[labels]
            norm = torch.linalg.vector_norm(distances, dim=None if self.magnitude_norm == "batch" else -1)
            terms["magnitude"] = self.magnitude_weight * norm.mean()
        if self.uses("regularization"):
            weights = [*self.valve.parameters(), *self.embeddings.parameters()]
            terms["regularization"] = self.regularization / 2 * square_term(weights)
        return terms

    def classify(self, features: Tensor) -> Tensor:
        """Class scores (N, C) of the head on the features under the client's own condition."""
        scores: Tensor = self.head(self.head_input(features))
        return scores

    def representations(self, features: Tensor) -> dict[str, Tensor]:
        """The shared features, and those of the two routes."""
        global_features = self.valve(features, self.conditions[0])
        return {"features": features, "global_features": global_features, "head_input": self.head_input(features)}
