"""FedDyn: dynamic regularization, by which local optima agree with the global one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.functional import proximal_term
from pfl_lightning.functional.losses import linear_term
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import AveragingAggregator
from pfl_lightning.state.tensors import TensorDict


class FedDyn(FederatedClient):
    """FedAvg with a linear and a proximal term, whose minimum a client reaches only where all clients do.

    Every client keeps g_k, an estimate of the gradient of its loss at its last model; the server keeps their mean h
    (Algorithm 1).

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        alpha: Weight of both terms, above 0.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation("Federated Learning Based on Dynamic Regularization", "Acar et al.", "ICLR", 2021)
    batch_norm = "shared"
    averages_samples = True
    loss_names = ("cross_entropy", "linear", "proximal")
    personalization_losses = ("cross_entropy",)
    not_exported = ("gradient.*",)

    def __init__(
        self, encoder: nn.Module, num_classes: int, *, alpha: float = 0.1, **options: Unpack[ClientOptions]
    ) -> None:
        check_number("alpha", alpha, strict=True)
        super().__init__(encoder, num_classes, **options)
        self.alpha = alpha
        shared = set(self.shared_names())
        covered = {name: torch.zeros_like(p) for name, p in self.named_parameters() if name in shared}
        self.gradient = TensorDict(covered)  # g_k; personal
        self.received = TensorDict(persistent=False)  # w^t, for the time of a fit
        self.descent = TensorDict(persistent=False)  # -g_k

    def receive(self, broadcast: Broadcast) -> None:
        """Take over w^t, and keep it."""
        super().receive(broadcast)
        own = dict(self.named_parameters())  # a copy in their memory layout, which steps are quicker with
        self.received.assign({name: own[name].detach().clone() for name in self.gradient.as_state()})

    def before_fit(self, context: FitContext) -> None:
        """Set -g_k."""
        self.descent.assign({name: -g for name, g in self.gradient.as_state().items()})

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """L_k(w) - <g_k, w - w^t> + alpha / 2 ||w - w^t||^2 (line 6), shifted by the constant <g_k, w^t>."""
        terms = super().loss_terms(features, labels)
        received = self.received.as_state()
        trained = {name: p for name, p in self.named_parameters() if name in received}
        if self.uses("linear"):
            terms["linear"] = linear_term(trained, received, self.descent.as_state())
        if self.uses("proximal"):
            terms["proximal"] = self.alpha / 2 * proximal_term(trained, {name: received[name] for name in trained})
        return terms

    @torch.no_grad()
    def make_update(self, context: FitContext, before: Any) -> ClientUpdate:
        """The trained model, as in FedAvg; g_k moves by -alpha (w_k - w^t) (line 7)."""
        received, trained = self.received.as_state(), dict(self.named_parameters())
        for name, gradient in self.gradient.as_state().items():
            gradient -= self.alpha * (trained[name] - received[name])
        return super().make_update(context, before)


class FedDynAggregator(AveragingAggregator, of=FedDyn):
    """The plain mean of w_k, minus h / alpha, with h the mean of all clients' g_k (lines 11 and 12).

    Args:
        client: See :class:`~pfl_lightning.server.Aggregator`.
        num_clients: Number of clients, novel ones included; m is the number of those that take part.
    """

    rolls_back_client_states = True  # h stays the mean of all g_k

    def __init__(self, client: FedDyn, num_clients: int) -> None:
        super().__init__(client, num_clients, by_samples=False)
        self.alpha = client.alpha
        self.h = TensorDict({name: torch.zeros_like(g) for name, g in client.gradient.as_state().items()})

    def aggregate(self) -> None:
        """Take the mean, then h and the step against it."""
        sent, count = self.weights.as_state(), self.running_average.total_weight  # a client counts one
        super().aggregate()
        if count == 0:
            return
        mean, share = self.weights.as_state(), count / self.facts.num_participating  # |P| / m
        h = {name: h - self.alpha * share * (mean[name] - sent[name]) for name, h in self.h.as_state().items()}
        self.h.assign(h)
        self.weights.assign({**mean, **{name: mean[name] - h[name] / self.alpha for name in h}})
