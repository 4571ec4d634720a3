"""Summaries of a client's class statistics for FedPAC: weighted class means and the variance of the features."""

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

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import ClassStatistics, weighted_class_means
        >>> statistics = ClassStatistics(num_classes=3, num_features=1, with_covariances=False)
        >>> statistics.update(torch.tensor([[1.0], [3.0], [6.0], [10.0]]), torch.tensor([0, 0, 1, 1]))
        >>> weighted_class_means(statistics).flatten().tolist()  # means 2 and 8, each with the share 1/2
        [1.0, 4.0, 0.0]
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

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import ClassStatistics, feature_variance
        >>> statistics = ClassStatistics(num_classes=2, num_features=1, with_covariances=False)
        >>> statistics.update(torch.tensor([[1.0], [3.0], [6.0], [10.0]]), torch.tensor([0, 0, 1, 1]))
        >>> feature_variance(statistics)  # 1/2 (1 + 9)/2 - (1/2)^2 2^2 + 1/2 (36 + 100)/2 - (1/2)^2 8^2
        tensor(19.5000, dtype=torch.float64)
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
