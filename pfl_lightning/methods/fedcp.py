"""FedCP: features separated by a conditional policy, for a global and a personal head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_number
from pfl_lightning.client import Batch, Citation, FederatedClient, FitContext
from pfl_lightning.functional.losses import maximum_mean_discrepancy
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.methods._frozen_copy import FrozenCopy
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.state.closures import copy_module

WIDTHS = (20.0, 30.0, 40.0, 100.0)
"""Widths of the Gaussian kernels, as in the published code."""


class PolicyNetwork(nn.Module):
    """Says of every number of a feature vector how much of it is personal; the rest is global.

    Args:
        width: Width d of the features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.ReLU())

    def forward(self, conditioned: Tensor) -> Tensor:
        """Shares r in (0, 1), (N, d), from features in the client's condition, (N, d)."""
        scores: Tensor = self.layers(conditioned).unflatten(-1, (2, -1))
        return scores.softmax(dim=-2)[..., 0, :]


class FedCP(FederatedClient):
    """Each sample's features are divided between a frozen global head and a personal one, whose scores are added.

    A policy network says for every sample and every feature how much of it goes to which head, from the features times
    a condition, which the client's own head gives. Encoder, policy and global head are averaged. The encoder is held
    near the received one by the distribution of its features.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        lam: lambda, the weight of the distance to the received encoder's features.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "FedCP: Separating Feature Information for Personalized Federated Learning via Conditional Policy",
        "Zhang et al.",
        "KDD",
        2023,
    )
    shared = ("encoder.*", "policy.*", "global_head.*")
    batch_norm = "shared"
    paper_batch_size = 10
    loss_names = ("cross_entropy", "alignment")
    personalization_losses = ("cross_entropy",)
    not_exported = ("started",)

    condition: Tensor
    started: Tensor

    def __init__(
        self, encoder: nn.Module, num_classes: int, *, lam: float = 5.0, **options: Unpack[ClientOptions]
    ) -> None:
        check_number("lam (lambda)", lam)
        super().__init__(encoder, num_classes, **options)
        self.lam = lam
        self.global_head = copy_module(self.head)
        self.never_trained = frozenset(f"global_head.{name}" for name, _ in self.global_head.named_parameters())
        self.policy = PolicyNetwork(self.feature_width)
        self.register_buffer("condition", torch.zeros(self.feature_width))  # personal: v_i, of norm 1
        self.register_buffer("started", torch.zeros((), dtype=torch.int64))  # whether the client has a head of its own
        self.received = FrozenCopy(self.encoder, persistent=False)  # for the time of a fit

    def receive(self, broadcast: Broadcast) -> None:
        """Take over what is shared; a client that has never trained takes the global head for its own, too."""
        super().receive(broadcast)
        if not int(self.started):
            self.head.load_state_dict(self.global_head.state_dict())
        self._set_condition()

    @torch.no_grad()
    def _set_condition(self) -> None:
        """v_i, the sum of the rows of the client's own head, divided by its norm."""
        self.condition.copy_(F.normalize(self.head.weight.sum(dim=0), dim=0))

    def before_fit(self, context: FitContext) -> None:
        """Keep the received encoder as it is."""
        self.started.fill_(1)
        self.received.take_over(self.encoder)

    def classify(self, features: Tensor) -> Tensor:
        """Scores (N, C) of both heads together: personal(r * h) + global((1 - r) * h)."""
        share = self.policy(features * self.condition)
        scores: Tensor = self.head(share * features) + self.global_head((1 - share) * features)
        return scores

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """F(w) + lambda MMD of the features and those of the received encoder."""
        if not self.uses("alignment"):
            return super().training_step(batch, batch_idx)
        inputs, labels = batch
        features = self.encode(inputs)
        distance = maximum_mean_discrepancy(features, self.received(inputs), WIDTHS)
        return self.sum_of_terms(self.loss_terms(features, labels) | {"alignment": self.lam * distance})

    @torch.no_grad()
    def make_update(self, context: FitContext, before: Any) -> ClientUpdate:
        """Encoder and policy, and the mean of both heads as the global one; the condition is the trained head's."""
        self._set_condition()
        update = super().make_update(context, before)
        merged = dict(update.weights)
        for name, own in self.head.state_dict().items():
            merged[f"global_head.{name}"] = (own + merged[f"global_head.{name}"]) / 2
        return ClientUpdate(**{**vars(update), "weights": merged})
