"""pFedSim: encoders of clients with similar classifiers are averaged."""

from __future__ import annotations

import math

from torch import Tensor, nn

from pfl_lightning.checks import check_number
from pfl_lightning.client import Citation, FederatedClient
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.functional import RunningAverage
from pfl_lightning.functional.numerics import in_double, unit_rows
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import AveragingAggregator
from pfl_lightning.state.client_states import ClientStates

LARGEST_SIMILARITY = 0.9999
"""Similarity of a client with itself, and the largest with another: the weight of 1 would be infinite."""


class PFedSim(FederatedClient):
    """FedAvg for some rounds; then every client gets its own head back, and a mixture of encoders of similar clients.

    What makes two clients similar are their heads, whose rows point to what each takes a class for.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        warmup: Rounds of FedAvg at the start: up to 1 the share of the planned rounds, above 1 their number.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`. With ``eval_model="aggregated"`` a
            client is evaluated as its next fit would begin, in the warm-up with the global model.
    """

    citation = Citation(
        "pFedSim: Similarity-Aware Model Aggregation Towards Personalized Federated Learning",
        "Tan et al.",
        "arXiv",
        2023,
    )
    batch_norm = "shared"
    eval_model = "trained"

    def __init__(
        self, encoder: nn.Module, num_classes: int, *, warmup: float = 0.5, **options: Unpack[ClientOptions]
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("warmup", warmup)
        if warmup > 1 and warmup != int(warmup):
            raise ConfigurationError(f"warmup must be a share in [0, 1] or a whole number of rounds, got {warmup}")
        self.warmup = warmup

    def check_run(self, facts: RunFacts) -> None:
        """Refuse a share of a number of rounds that nobody knows."""
        if 0 < self.warmup <= 1 and facts.num_rounds is None:
            raise ConfigurationError(
                f"warmup={self.warmup:g} of pFedSim is a share of the planned rounds, and the Trainer has no number of "
                "them: set its max_epochs, or set a number of rounds, such as warmup=50"
            )


class PFedSimAggregator(AveragingAggregator, of=PFedSim):
    """FedAvg's mean in the warm-up; then the last model of each client, whose encoders it mixes for every client.

    Clients without a model yet get the global model of the warm-up.
    """

    def __init__(self, client: PFedSim, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.warmup = client.warmup
        shared = self.weights.as_state()
        self.head_names = frozenset(client.match(shared, client.heads))
        self.models = ClientStates(shared, num_clients)
        self._cohort: list[ClientUpdate] = []  # of this round

    def broadcast(self, client: int, round: int) -> Broadcast:
        """The client's own head and its mixture of encoders, sum_j a_ij w_j; without a model, the global one."""
        if not self.models.written(client):
            return super().broadcast(client, round)
        own, mixture = self.models.get(client), RunningAverage()
        for other in range(self.num_clients):
            if self.models.written(other):
                model = self.models.get(other)
                similarity = 1.0 if other == client else classifier_similarity(own["head.weight"], model["head.weight"])
                weight = -math.log(1 - min(similarity, LARGEST_SIMILARITY))  # a_ij, but for a common factor
                if weight > 0:
                    mixture.update({n: w for n, w in model.items() if n not in self.head_names}, weight)
        return Broadcast(client=client, round=round, weights={**own, **mixture.result()})

    idle_broadcast = Broadcast

    def receive(self, update: ClientUpdate) -> None:
        """Add one client's model to the mean; after the warm-up, hold it until the round ends."""
        rounds = self.warmup if self.warmup > 1 else int(self.warmup * (self.facts.num_rounds or 0))
        if update.round < rounds:
            super().receive(update)
        else:
            self._cohort.append(update)

    def aggregate(self) -> None:
        """Take the mean, or each client's own model."""
        super().aggregate()
        for update in self._cohort:
            self.models.set(update.client, update.weights)
        self._cohort = []


def classifier_similarity(first: Tensor, second: Tensor) -> float:
    """Mean over classes of the cosine of both heads' rows; 0 where it is negative.

    Args:
        first: (C, d) weights of a linear head.
        second: (C, d) weights of another.

    Example:
        >>> import torch
        >>> from pfl_lightning.methods.pfedsim import classifier_similarity
        >>> first, second = torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> classifier_similarity(first, second), classifier_similarity(first, -first)
        (0.5, 0.0)
    """
    cosines = (unit_rows(in_double(first)) * unit_rows(in_double(second))).sum(dim=1)
    return max(float(cosines.mean()), 0.0)
