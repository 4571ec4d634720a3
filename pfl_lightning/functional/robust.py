"""Averages that a few arbitrary inputs cannot move at will, and scores of single inputs."""

from __future__ import annotations

from torch import Tensor

TINY = 1e-30


def squared_distances(gram: Tensor) -> Tensor:
    """Squared distances |x_i - x_j|^2, (..., m, m), from inner products <x_i, x_j>, (..., m, m).

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.robust import squared_distances
        >>> points = torch.tensor([[0.0], [1.0], [3.0]])
        >>> squared_distances(points @ points.T)
        tensor([[0., 1., 9.],
                [1., 0., 4.],
                [9., 4., 0.]])
    """
    norms = gram.diagonal(dim1=-2, dim2=-1)
    return (norms[..., :, None] + norms[..., None, :] - 2 * gram).clamp(min=0)


def krum_scores(distances: Tensor, byzantine: int, skip: int = 0) -> Tensor:
    """Scores of Krum, (m,): sums of squared distances to the m - f - 2 closest others (Blanchard et al., 2017).

    Args:
        distances: Squared distances, (m, m).
        byzantine: f, with m of at least 2 f + 3.
        skip: Closest others that do not count.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.robust import krum_scores
        >>> line = torch.tensor([0.0, 1.0, 2.0, 4.0, 100.0])
        >>> krum_scores((line[:, None] - line).square(), byzantine=1)  # the two closest of each
        tensor([5.0000e+00, 2.0000e+00, 5.0000e+00, 1.3000e+01, 1.8820e+04])
    """
    closest = len(distances) - byzantine - 2
    return distances.sort(dim=1).values[:, 1 + skip : closest + 1].sum(1)  # the first is the distance to itself


def coordinate_median(values: Tensor) -> Tensor:
    """Median of each coordinate over the first axis (Yin et al., 2018, definition 1); of an even number, the middle."""
    ordered = values.sort(dim=0).values
    count = len(ordered)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2


def trimmed_mean(values: Tensor, trimmed: int) -> Tensor:
    """Mean of each coordinate without its ``trimmed`` smallest and largest values (Yin et al., 2018, definition 2)."""
    return values.sort(dim=0).values[trimmed : len(values) - trimmed].mean(0)


def _distances_from(gram: Tensor, weights: Tensor) -> Tensor:
    """Distances |x_i - v|, (m,), from v = sum_k a_k x_k, by the inner products."""
    squared = gram.diagonal() - 2 * (gram @ weights) + weights @ gram @ weights
    return squared.clamp(min=0).sqrt()


def geometric_median_weights(gram: Tensor, shares: Tensor, smoothing: float, steps: int) -> Tensor:
    """Weights a of the smoothed geometric median v = sum_k a_k x_k (RFA, Pillutla et al., 2022, Algorithm 2).

    Args:
        gram: Inner products of the points, (m, m), in double precision.
        shares: alpha_k, (m,), which sum to one.
        smoothing: nu, the least distance that counts.
        steps: R, steps of Weiszfeld's algorithm, from the weighted mean.
    """
    weights = shares
    for _ in range(steps):
        beta = shares / _distances_from(gram, weights).clamp(min=smoothing)  # beta_k = alpha_k / max(nu, |v - w_k|)
        weights = beta / beta.sum()  # v = sum_k beta_k w_k / sum_k beta_k
    return weights


def centered_clipping_weights(gram: Tensor, radius: float | None, steps: int) -> Tensor:
    """Weights a of v = sum_k a_k x_k, by clipping around v from v = 0 (Karimireddy et al., 2021, Algorithm 2).

    Args:
        gram: Inner products of the points, (m, m), in double precision.
        radius: tau; ``None`` takes the median distance from v in every step.
        steps: Clipping steps.
    """
    weights = gram.new_zeros(len(gram))
    for _ in range(steps):
        distances = _distances_from(gram, weights)
        bound = coordinate_median(distances) if radius is None else radius
        kept = (bound / distances.clamp(min=TINY)).clamp(max=1)  # min(1, tau / |x_i - v|)
        weights = weights * (1 - kept.mean()) + kept / len(kept)  # v + 1/n sum_i (x_i - v) min(1, tau / |x_i - v|)
    return weights
