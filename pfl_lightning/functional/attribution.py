"""Attribution of a classification to single feature units: FedClassAvg's Figure 9 (ICPP 2022)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["layer_conductance", "rank_correlation", "rank_scores"]


def layer_conductance(
    encoder: Callable[[Tensor], Tensor],
    classify: Callable[[Tensor], Tensor],
    inputs: Tensor,
    labels: Tensor,
    steps: int = 32,
    baseline: float = 0.0,
) -> Tensor:
    """Conductance of each feature unit for the score of a class (Dhamdhere et al. 2018; FedClassAvg, section 5.3).

    On the straight line from a baseline x' to the input x, unit j has
    Cond_j = integral over a of dF / dz_j (z(a)) dz_j(a) / da da, with z(a) the features of x' + a (x - x') and F the
    score of the class. Here by the trapezoidal rule over ``steps`` pieces, which takes forward passes of the encoder
    alone (Shrikumar et al. 2018). The units' conductances add up to F(x) - F(x').

    Args:
        encoder: From inputs (B, ...) to features (B, d).
        classify: From features (B, d) to scores (B, C).
        inputs: x, (n, ...).
        labels: The class whose score is explained, (n,).
        steps: Pieces of the line.
        baseline: The value of x' everywhere.

    Returns:
        (n, d), without gradient.

    Raises:
        ValueError: Fewer than one step.

    Example:
        A linear model, F(x) = x_1 + 10 x_2: the conductances add up to F(x) - F(0) = 32.

        >>> import torch
        >>> from pfl_lightning.functional import layer_conductance
        >>> weights = torch.tensor([[1.0, 10.0], [0.0, 0.0]])
        >>> layer_conductance(lambda x: x, lambda z: z @ weights.T, torch.tensor([[2.0, 3.0]]), torch.tensor([0]))
        tensor([[ 2., 30.]])
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    before = _features_and_gradients(encoder, classify, torch.full_like(inputs, baseline), labels)
    total = torch.zeros_like(before[0])
    for step in range(1, steps + 1):
        point = baseline + (step / steps) * (inputs - baseline)
        now = _features_and_gradients(encoder, classify, point, labels)
        total += (now[0] - before[0]) * (now[1] + before[1]) / 2
        before = now
    return total


def _features_and_gradients(
    encoder: Callable[[Tensor], Tensor], classify: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        features = encoder(inputs)
    with torch.enable_grad():
        units = features.detach().requires_grad_(True)
        scores = classify(units).gather(1, labels[:, None]).sum()  # samples do not meet: each row has its own gradient
        (gradient,) = torch.autograd.grad(scores, units)
    return features.detach(), gradient.detach()


def rank_scores(values: Tensor) -> Tensor:
    """Ranks along the last dimension, from 0 for the smallest to 1 for the greatest; equal values share a mean rank.

    Args:
        values: (..., d).

    Returns:
        (..., d) float64 on the CPU; 0.5 everywhere for a single unit.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import rank_scores
        >>> rank_scores(torch.tensor([[30.0, 10.0, 20.0], [1.0, 1.0, 5.0]]))
        tensor([[1.0000, 0.0000, 0.5000],
                [0.2500, 0.2500, 1.0000]], dtype=torch.float64)
    """
    given = values.detach().to("cpu", torch.float64)
    flat = given.reshape(-1, given.shape[-1])
    below = torch.stack([torch.searchsorted(row.sort().values, row, side="left") for row in flat])
    upto = torch.stack([torch.searchsorted(row.sort().values, row, side="right") for row in flat])
    width = given.shape[-1]
    ranks = (below + upto - 1).double() / 2
    scores = ranks / (width - 1) if width > 1 else torch.full_like(ranks, 0.5)
    return scores.reshape(given.shape)


def rank_correlation(values: Tensor) -> Tensor:
    """Spearman's rank correlation of each pair of rows.

    Args:
        values: (m, d).

    Returns:
        (m, m) float64 on the CPU; NaN for a row of equal values.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import rank_correlation
        >>> rank_correlation(torch.tensor([[1.0, 2.0, 3.0], [1.0, 10.0, 1000.0], [3.0, 1.0, 2.0]])).round(decimals=2)
        tensor([[ 1.0000,  1.0000, -0.5000],
                [ 1.0000,  1.0000, -0.5000],
                [-0.5000, -0.5000,  1.0000]], dtype=torch.float64)
    """
    ranks = rank_scores(values)
    centered = ranks - ranks.mean(dim=1, keepdim=True)
    unit: Tensor = centered / centered.norm(dim=1, keepdim=True)  # 0 / 0 for equal values
    return unit @ unit.T
