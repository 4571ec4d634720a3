"""FedDBE: FedAvg with domain bias eliminator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_between, check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.functional import RunningAverage
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.messages import Broadcast, ClientUpdate, statistics_field
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import AveragingAggregator


@dataclass(frozen=True, kw_only=True)
class FedDBEBroadcast(Broadcast):
    """The global model and, after the first round, the consensual mean.

    Attributes:
        global_mean: Mean of the clients' features in the first round, (d,); ``None`` in it.
    """

    global_mean: Tensor | None = statistics_field(shape="d", default=None)


@dataclass(frozen=True, kw_only=True)
class FedDBEUpdate(ClientUpdate):
    """The trained model and, in the first round, the client's mean.

    Attributes:
        local_mean: Running mean of the client's features over its batches, (d,); of the last one with momentum 1.
    """

    local_mean: Tensor | None = statistics_field(shape="d", floating=True, when="collecting", tells="feature mean")


class FedDBE(FederatedClient):
    """FedAvg whose features are freed of each client's bias, which a personal mean vector holds.

    The head sees a feature vector plus the client's own mean, which is trained with the model and stays on the client
    (PRBM). Without it, a running mean of the features is held to one mean for all clients (MR), so that the shared
    model need not learn what distinguishes clients.

    In the first round clients train without either, to find the mean for all. With the default ``mean_momentum`` of 1
    that is the mean of what each client's last batch of that round gives, not of all its samples.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        kl_weight: kappa, how strongly the features' mean is held to that for all clients.
        mean_momentum: Weight of a batch in the running mean of the features, in (0, 1]; 1 takes the batch alone: what a
            client sends in the first round is then the mean of its last batch.
        first_round: ``"discard"`` takes from the first round the mean alone, and starts again from the initial model;
            ``"average"`` keeps the models of the first round, too.
        personal_head: Whether the head stays on the client (FedPer with this method).
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "Eliminating Domain Bias for Federated Learning in Representation Space", "Zhang et al.", "NeurIPS", 2023
    )
    feature_based = True
    scores_features = True
    batch_norm = "shared"
    heads = ("head.*", "client_mean")
    loss_names = ("cross_entropy", "mean_regularization")
    personalization_losses = ("cross_entropy",)

    global_mean: Tensor
    running_mean: Tensor
    active: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        kl_weight: float = 50.0,
        mean_momentum: float = 1.0,
        first_round: str = "discard",
        personal_head: bool = False,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("kl_weight (kappa)", kl_weight)
        check_number("mean_momentum", mean_momentum, strict=True)
        check_between("mean_momentum", mean_momentum, 0, 1)
        check_choice("first_round", first_round, ("discard", "average"))
        self.kl_weight, self.mean_momentum, self.first_round = kl_weight, mean_momentum, first_round
        if personal_head:
            self.shared = ("encoder.*",)
        width = self.feature_width
        self.client_mean = nn.Parameter(torch.zeros(width))  # personal
        self.register_buffer("global_mean", torch.zeros(width), persistent=False)
        self.register_buffer("running_mean", torch.zeros(width), persistent=False)  # of this fit
        self.register_buffer("active", torch.zeros(()), persistent=False)  # 1 after the first round

    def receive(self, broadcast: FedDBEBroadcast) -> None:
        """Take over the model and the mean for all clients."""
        super().receive(broadcast)
        self.active.fill_(broadcast.global_mean is not None)
        if broadcast.global_mean is not None:
            self.global_mean.copy_(broadcast.global_mean)

    def before_fit(self, context: FitContext) -> None:
        """Every fit's running mean starts at zero."""
        self.running_mean.zero_()

    def head_input(self, features: Tensor) -> Tensor:
        """The features plus the client's mean, which does not train in the first round."""
        fixed = self.client_mean.detach()
        return features + (fixed + self.active * (self.client_mean - fixed))

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Cross entropy behind the client's mean, and kappa times half the mean squared distance of the means."""
        terms = super().loss_terms(features, labels)
        if self.uses("mean_regularization"):
            mean = at_least_single(features).mean(dim=0)
            running = (1 - self.mean_momentum) * self.running_mean + self.mean_momentum * mean
            self.running_mean.copy_(running.detach())  # gradients stay within a batch
            distance = 0.5 * (running - self.global_mean).square().mean()
            terms["mean_regularization"] = self.active * self.kl_weight * distance
        return terms

    def classify(self, features: Tensor) -> Tensor:
        """Class scores (N, C) of the head on the features plus the client's mean."""
        scores: Tensor = self.head(self.head_input(features))
        return scores

    def representations(self, features: Tensor) -> dict[str, Tensor]:
        """The shared features, and what enters the head."""
        return {"features": features, "head_input": self.head_input(features)}

    def make_update(self, context: FitContext, before: Any) -> FedDBEUpdate:
        """The trained model and, in the first round, the running mean of its features."""
        mean = None if bool(self.active) else self.running_mean.clone()
        return FedDBEUpdate(**vars(super().make_update(context, before)), local_mean=mean)


class FedDBEAggregator(AveragingAggregator, of=FedDBE):
    """FedAvg's mean of models; in the first round, the mean of the clients' means, both weighted by samples.

    Args:
        client: See :class:`~pfl_lightning.server.Aggregator`.
        num_clients: Number of clients, m.
    """

    update_class = FedDBEUpdate
    averages = True

    global_mean: Tensor
    found: Tensor

    def __init__(self, client: FedDBE, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.discards = client.first_round == "discard"
        self.register_buffer("global_mean", torch.zeros_like(client.global_mean))
        self.register_buffer("found", torch.zeros((), dtype=torch.int64))  # 1 once there is a mean for all
        self._means = RunningAverage()  # of the first round

    @property
    def collecting(self) -> bool:
        """Whether clients send their means: in the first round."""
        return not bool(self.found)

    def broadcast(self, client: int, round: int) -> FedDBEBroadcast:
        """The global model and the mean for all clients, the same for every client."""
        mean = None if self.collecting else self.global_mean
        return FedDBEBroadcast(client=client, round=round, weights=self.weights.as_state(), global_mean=mean)

    def receive(self, update: FedDBEUpdate) -> None:
        """Add one client's model, and its mean."""
        if update.local_mean is not None:
            self._means.update({"mean": update.local_mean}, update.num_samples)
        super().receive(update)

    def aggregate(self) -> None:
        """Take the mean of the models; in the first round that of the means, and the models only if they are kept."""
        means, self._means = self._means, RunningAverage()
        if means.total_weight > 0:
            self.global_mean = means.result()["mean"]
            self.found = torch.ones_like(self.found)
            if self.discards:
                self.running_average = RunningAverage()
        super().aggregate()
