"""The server of Calibre: what clients upload to it, and how it averages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_lightning.client import FederatedClient
from pfl_lightning.errors import InvalidMessageError
from pfl_lightning.messages import ClientUpdate, State, statistics_field
from pfl_lightning.server import AveragingAggregator

__all__ = ["CalibreUpdate", "DivergenceAwareAggregator"]

COLLAPSED = torch.finfo(torch.float32).tiny
"""A divergence rate below this counts as zero."""


@dataclass(frozen=True, kw_only=True)
class CalibreUpdate(ClientUpdate):
    """The client's shared state, and how far its encodings lie from the centroids of their clusters.

    Attributes:
        divergence: The divergence rate, a scalar.
    """

    divergence: Tensor = statistics_field()


class DivergenceAwareAggregator(AveragingAggregator):
    """The mean of the clients' shared state, w_k proportional to 1 / divergence_k (section IV-B).

    The weights are those of :func:`~pfl_lightning.functional.inverse_divergence_weights`. Only updates with a rate of
    zero, which wait for the smallest positive one of the cohort, are held until the round's end.

    Args:
        client: See :class:`~pfl_lightning.server.Aggregator`.
        num_clients: Number of clients, m.
    """

    def __init__(self, client: FederatedClient, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self._start_round()

    def _start_round(self) -> None:
        self._smallest = float("inf")
        self._collapsed: list[State] = []

    def receive(self, update: ClientUpdate) -> None:
        """Add one client's state to the running average."""
        assert isinstance(update, CalibreUpdate)
        update.check_like("weights", update.weights, self.weights.as_state())
        update.check_shape("divergence", update.divergence)
        update.check_finite()
        divergence = float(update.divergence)
        if divergence < 0:
            raise InvalidMessageError(
                update.client, update.round, f"the divergence rate is {divergence}, expected a mean distance, >= 0"
            )
        if divergence < COLLAPSED:
            self._collapsed.append(update.weights)
            return
        self._smallest = min(self._smallest, divergence)
        self._average.update(update.weights, 1.0 / divergence)

    def aggregate(self) -> None:
        """Take the mean."""
        for state in self._collapsed:
            self._average.update(state, 1.0 / self._smallest if self._smallest < float("inf") else 1.0)
        self._start_round()
        super().aggregate()
