"""What FedPAC makes of a client's class statistics: weighted class means and the variance of the features."""

from __future__ import annotations

import torch
from torch import Tensor

from pfl_lightning.functional.statistics.class_statistics import ClassStatistics


def weighted_class_means(statistics: ClassStatistics) -> Tensor:
    """Class means times class shares, h_k of FedPAC: rows P_k(y) mu_ky (eqs. 34 and 39).

    Args:
        statistics: one client's statistics, of at least one sample.

    Returns:
        (C, d) float64; zero rows for absent classes.

    Raises:
        ValueError: if the statistics are empty.
    """
    return _class_shares(statistics).unsqueeze(1) * statistics.means


def feature_variance(statistics: ClassStatistics) -> Tensor:
    """Variance V_k of FedPAC, eq. (44): sum_y P(y) tr E[f f^T | y] - P(y)^2 ||mu_y||^2.

    Evaluated as sum_y P(y) E[||f - mu_y||^2 | y] + P(y) (1 - P(y)) ||mu_y||^2, the same without cancellation, so
    that it is never negative.

    Args:
        statistics: one client's statistics, of at least one sample.

    Returns:
        A float64 scalar >= 0.

    Raises:
        ValueError: if the statistics are empty.
    """
    shares = _class_shares(statistics)
    within = statistics.square_deviations / statistics.counts.clamp(min=1)
    return (shares * within + shares * (1 - shares) * statistics.means.square().sum(dim=1)).sum()


def _class_shares(statistics: ClassStatistics) -> Tensor:
    counts = statistics.counts.to(torch.float64)
    total = counts.sum()
    if not bool(total > 0):
        raise ValueError("class shares need at least one sample, got none: has update() been called?")
    return counts / total
