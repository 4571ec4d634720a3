"""Several states of one model in a broadcast, of which a client loads one at a time into its single network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.client import FederatedClient
from pfl_lightning.fit.data import FitData
from pfl_lightning.functional.inner_loop import evaluating
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.messages import Broadcast, State, statistics_field, weight_field
from pfl_lightning.server import AggregationWeights


@dataclass(frozen=True, kw_only=True)
class BankBroadcast(Broadcast):
    """States of one model side by side.

    Attributes:
        bank: The states, stacked: tensors (j, ...) by name.
        members: What the rows are, such as numbers of clusters or of clients, (j,).
    """

    bank: State = weight_field()
    members: Tensor = statistics_field(shape="j", dtype=torch.int64, at_least=0)


def stacked(states: Sequence[State]) -> dict[str, Tensor]:
    """States as one bank, (j, ...) by name.

    Example:
        >>> import torch
        >>> from pfl_lightning.methods._bank import row_of, stacked
        >>> bank = stacked([{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}])
        >>> bank["w"].shape, row_of(bank, 1)
        (torch.Size([2, 1]), {'w': tensor([2.])})
    """
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def row_of(bank: State, row: int) -> dict[str, Tensor]:
    """One state of a bank; views."""
    return {name: tensor[row] for name, tensor in bank.items()}


@torch.no_grad()
def mean_loss(client: FederatedClient, data: FitData) -> float:
    """Mean cross entropy of the client's current model on samples as they are, in evaluation mode.

    Features are computed once as long as the encoder does not change.
    """
    with evaluating(client):
        features, labels = client.features_of(data)
        with data.forward_context():
            scores = client.classify(features)
    return float(F.cross_entropy(at_least_single(scores), labels))


def weights_in_clusters(chosen: Sequence[tuple[int, int, float]]) -> AggregationWeights:
    """Row i has the weights of the mean of client i's cluster, from clients, their clusters and their weights."""
    clusters = torch.tensor([cluster for _, cluster, _ in chosen])
    weights = torch.tensor([weight for _, _, weight in chosen], dtype=torch.float64)
    together = (clusters[:, None] == clusters) * weights
    return AggregationWeights(tuple(client for client, _, _ in chosen), together / together.sum(1, keepdim=True))
