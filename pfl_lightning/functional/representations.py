"""Measures for the inspection of trained encoders: representations (DualFed), and attributions (FedClassAvg)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.functional.numerics import check_tensor

NEGLIGIBLE = 1e-12  # a distance or a norm, relative to 1, that rounding alone may leave


def class_separation(features: Tensor, labels: Tensor) -> float:
    """Class separation R^2 (Kornblith et al., NeurIPS 2021), which DualFed's Figure 5 shows.

    R^2 = 1 - d_within / d_total, with cosine distances d(x, y) = 1 - <x, y> / (|x| |y|); d_within is their mean over
    the pairs within a class, d_total that over all pairs of classes, every class counted once:

        d_within = 1 / K sum_k 1 / N_k^2 sum_mn d(x_km, x_kn)
        d_total = 1 / K^2 sum_jk 1 / (N_j N_k) sum_mn d(x_jm, x_kn)

    With unit vectors u both sums are norms of means, mean_k |u_k|^2 and |mean_k u_k|^2 for the classes' means u_k, so
    that no pair is ever formed.

    Args:
        features: (n, d).
        labels: (n,) classes; classes without samples are ignored.

    Returns:
        1 where every class is one direction, 0 where classes have the same mean direction; NaN for fewer than two
        classes, or where all features have the same direction.

    Raises:
        ValueError: The shapes do not fit.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import class_separation
        >>> features = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
        >>> class_separation(features, torch.tensor([0, 0, 1, 1]))  # each class is one direction
        1.0
        >>> class_separation(features, torch.tensor([0, 1, 0, 1]))  # both classes have the same mean direction
        0.0
    """
    check_tensor("features", features, (len(labels), "width"))
    unit = F.normalize(features.detach().to("cpu", torch.float64), dim=1)
    classes = labels.cpu().unique()
    if len(classes) < 2:
        return float("nan")
    means = torch.stack([unit[labels.cpu() == c].mean(dim=0) for c in classes])
    within = 1 - float(means.square().sum(dim=1).mean())
    total = 1 - float(means.mean(dim=0).square().sum())
    return 1 - within / total if total > NEGLIGIBLE else float("nan")


def linear_cka(first: Tensor, second: Tensor) -> float:
    """Linear centered kernel alignment of two representations of the same samples (Kornblith et al., ICML 2019).

    CKA = |Y^T X|_F^2 / (|X^T X|_F |Y^T Y|_F) for centered X and Y. It does not change when either is rotated, shifted
    or scaled. With few samples for the width of the features it is biased upwards.

    Args:
        first: X, (n, d).
        second: Y, (n, e); the widths may differ.

    Returns:
        A number in [0, 1]; NaN where a representation is the same for all samples.

    Raises:
        ValueError: The numbers of samples differ, or there are none.

    Example:
        A shift and a scaling change nothing:

        >>> import torch
        >>> from pfl_lightning.functional import linear_cka
        >>> first = torch.tensor([[1.0], [2.0], [3.0]])
        >>> round(linear_cka(first, 5 - 2 * first), 6)
        1.0
        >>> round(linear_cka(first, torch.tensor([[1.0], [-2.0], [1.0]])), 6)  # uncorrelated
        0.0
    """
    return float(pairwise_linear_cka([first, second])[0, 1])


def pairwise_linear_cka(representations: Sequence[Tensor]) -> Tensor:
    """:func:`linear_cka` of each pair (DualFed's Figure 6 has the clients').

    Computed from the Gram matrices of the samples, <X X^T, Y Y^T>_F = |Y^T X|_F^2, one for each representation.

    Args:
        representations: m representations of the same n samples, (n, d_k).

    Returns:
        (m, m) float64 on the CPU; the diagonal is 1. NaN where a representation is the same for all samples.

    Raises:
        ValueError: There is none, or the numbers of samples differ.

    Example:
        For one feature each, CKA is the squared correlation of the two:

        >>> import torch
        >>> from pfl_lightning.functional import pairwise_linear_cka
        >>> one, two = torch.tensor([[0.0], [0.0], [1.0], [1.0]]), torch.tensor([[0.0], [0.0], [0.0], [1.0]])
        >>> pairwise_linear_cka([one, two])  # correlation 1 / sqrt(3)
        tensor([[1.0000, 0.3333],
                [0.3333, 1.0000]], dtype=torch.float64)
    """
    if not representations or not len(representations[0]):
        raise ValueError("there is no representation to compare: give at least one, of at least one sample")
    grams = []
    for one in representations:
        check_tensor("a representation", one, (len(representations[0]), "width"))
        values = one.detach().to("cpu", torch.float64)
        centered = values - values.mean(dim=0)
        constant = bool(centered.abs().max() <= NEGLIGIBLE * values.abs().max())
        gram = (centered @ centered.T).flatten()
        grams.append(gram * float("nan") if constant else gram / gram.norm())
    stacked = torch.stack(grams)
    return stacked @ stacked.T


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
