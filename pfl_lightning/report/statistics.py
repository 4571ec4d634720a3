"""Figures over seeds, and what it takes to reach a target accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pfl_lightning.runs.results import FinishedRun, HistoryEntry

__all__ = ["OverSeeds", "Target", "learning_curve", "over_seeds", "reach"]


@dataclass(frozen=True)
class OverSeeds:
    """A figure over the seeds of a row.

    Attributes:
        mean: Mean over the seeds that have the figure; NaN where none has it, or one does not know it.
        std: Standard deviation over them (of a sample); NaN of fewer than two.
        count: How many seeds have the figure.
        seeds: How many seeds there are.
    """

    mean: float
    std: float
    count: int
    seeds: int


def over_seeds(values: Sequence[float]) -> OverSeeds:
    """Mean and standard deviation over seeds.

    Args:
        values: The figure of each seed; NaN where it is not known, infinity where it was not reached.

    Example:
        >>> over_seeds([0.5, 0.75])
        OverSeeds(mean=0.625, std=0.1767766952966369, count=2, seeds=2)
        >>> over_seeds([12.0, math.inf])  # one of two seeds reached the target
        OverSeeds(mean=12.0, std=nan, count=1, seeds=2)
    """
    if any(math.isnan(value) for value in values):
        return OverSeeds(math.nan, math.nan, 0, len(values))
    found = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
    mean = float(found.mean()) if len(found) else math.nan
    std = float(found.std(ddof=1)) if len(found) > 1 else math.nan
    return OverSeeds(mean, std, len(found), len(values))


@dataclass(frozen=True)
class Target:
    """What a run needed until its mean test accuracy was at a target; infinite where it never was.

    Attributes:
        rounds: Rounds.
        megabytes: Megabytes in both directions; NaN where unknown.
        seconds: Seconds; NaN where unknown.
    """

    rounds: float
    megabytes: float
    seconds: float


ROUNDING = 1e-9
"""By how much a mean of shares of samples may be off: 0.9 is not always the mean of shares whose mean is 0.9."""


def reach(history: Sequence[HistoryEntry], target: float) -> Target:
    """What a run needed to reach a target.

    Args:
        history: The evaluated rounds, in order.
        target: Mean test accuracy over clients, in [0, 1].

    Example:
        >>> reach([HistoryEntry(5, test=0.4, bytes_up=10**6, bytes_down=2 * 10**6), HistoryEntry(10, test=0.6)], 0.4)
        Target(rounds=5.0, megabytes=3.0, seconds=nan)
    """
    means = _column(history, "test")
    if np.isnan(means).all():
        return Target(math.nan, math.nan, math.nan)
    reached = np.flatnonzero(means >= target - ROUNDING)
    if not len(reached):
        return Target(math.inf, math.inf, math.inf)
    seconds, first = np.cumsum(_column(history, "seconds")), reached[0]
    return Target(float(history[first].round), float(_megabytes(history)[first]), float(seconds[first]))


def _column(history: Sequence[HistoryEntry], name: str) -> NDArray[np.float64]:
    """A figure of the rounds; NaN where it is not known."""
    return np.array([getattr(entry, name) for entry in history], dtype=np.float64)


def _megabytes(history: Sequence[HistoryEntry]) -> NDArray[np.float64]:
    """Megabytes in both directions until the end of each round."""
    return np.cumsum(_column(history, "bytes_up") + _column(history, "bytes_down")) / 1e6


def learning_curve(runs: Sequence[FinishedRun]) -> list[tuple[int, float, float, float]]:
    """Round, megabytes, mean and standard deviation over seeds of the test accuracy, of rounds that every seed has.

    Megabytes are means over seeds of those in both directions up to the round; NaN where unknown.
    """
    curves = []
    for run in runs:
        entries = zip(run.history, _megabytes(run.history), _column(run.history, "test"), strict=True)
        curves.append({e.round: (float(size), float(mean)) for e, size, mean in entries if not math.isnan(mean)})
    common = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    found = []
    for round in common:
        sizes, values = np.array([curve[round] for curve in curves]).T
        spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        found.append((round, float(sizes.mean()), float(values.mean()), spread))
    return found
