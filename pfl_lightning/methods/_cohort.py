"""Base of the servers that need all updates of a round at once."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from pfl_lightning.server import Aggregator


class CohortAggregator(Aggregator):
    """Server that keeps the updates of a round until it ends, and then combines them.

    Args:
        client: A client of the method.
        num_clients: Number of clients.
    """

    def __init__(self, client: Any, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self._cohort: list[Any] = []  # messages, which a snapshot of the server does not copy

    def receive(self, update: Any) -> None:
        """Keep the update until the round ends."""
        self._cohort.append(update)

    def aggregate(self) -> None:
        """Combine what was received, if anything was."""
        cohort, self._cohort = self._cohort, []
        if cohort:
            self.combine(cohort)

    @abstractmethod
    def combine(self, cohort: list[Any]) -> None:
        """Combine the updates of a round, at least one, in the order in which they came."""
