"""Quality and similarity of representations: DualFed's measures (ACM MM 2024, Figures 5 and 6)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["class_separation", "linear_cka", "pairwise_linear_cka"]

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
    _check_rows("features", features, len(labels))
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
    if not representations:
        raise ValueError("there is no representation to compare: give at least one")
    grams = []
    for one in representations:
        _check_rows("a representation", one, len(representations[0]))
        values = one.detach().to("cpu", torch.float64)
        centered = values - values.mean(dim=0)
        constant = bool(centered.abs().max() <= NEGLIGIBLE * values.abs().max())
        gram = (centered @ centered.T).flatten()
        grams.append(gram * float("nan") if constant else gram / gram.norm())
    stacked = torch.stack(grams)
    return stacked @ stacked.T


def _check_rows(what: str, values: Tensor, rows: int) -> None:
    if values.ndim != 2 or len(values) != rows or rows == 0:
        raise ValueError(f"expected {what} of shape ({rows or 'samples'}, width), got {tuple(values.shape)}")
