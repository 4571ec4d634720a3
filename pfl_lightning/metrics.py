"""How the accuracies of many clients become a handful of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["AccuracySummary", "EvalMetrics", "summarize"]


@dataclass(frozen=True)
class EvalMetrics:
    """One client's model on one of its own parts.

    Attributes:
        accuracy: Share of samples classified rightly, in [0, 1].
        loss: Mean cross entropy, in nats.
        num_samples: Number of samples.
        logged: What a module of one's own logged on the part, by name.
    """

    accuracy: float
    loss: float
    num_samples: int
    logged: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AccuracySummary:
    """Accuracies over clients, each client counted once.

    Attributes:
        mean: Mean over clients.
        std: Standard deviation over clients (of the population, not of a sample).
        worst_decile: Mean of the worst tenth of the clients (at least one client).
        best: Accuracy of the best client.
        worst: Accuracy of the worst client.
        best_client: Number of the best client.
        worst_client: Number of the worst client.
    """

    mean: float
    std: float
    worst_decile: float
    best: float
    worst: float
    best_client: int
    worst_client: int

    def as_dict(self) -> dict[str, float | int]:
        """The summary by name."""
        return asdict(self)


def summarize(clients: Sequence[int], accuracies: Sequence[float] | NDArray[np.float64]) -> AccuracySummary:
    """Summarise accuracies over clients.

    Args:
        clients: Numbers of the clients, (m,).
        accuracies: Their accuracies, (m,).

    Raises:
        ValueError: No client.
    """
    values = np.asarray(accuracies, dtype=np.float64)
    if not len(values):
        raise ValueError("there is no client to summarize")
    worst = np.sort(values)[: math.ceil(len(values) / 10)]
    return AccuracySummary(
        mean=float(values.mean()),
        std=float(values.std()),
        worst_decile=float(worst.mean()),
        best=float(values.max()),
        worst=float(values.min()),
        best_client=int(clients[int(values.argmax())]),
        worst_client=int(clients[int(values.argmin())]),
    )
