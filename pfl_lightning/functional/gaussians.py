"""Gaussian models of classes: their covariances as small factors, and virtual features drawn from them."""

from __future__ import annotations

import torch
from torch import Tensor

from pfl_lightning.functional.class_statistics import ClassStatistics
from pfl_lightning.functional.numerics import check_tensor, one_thread
from pfl_lightning.functional.tensor_lists import float64_device

OVERSAMPLING = 10  # columns of a sketch beyond the rank: its condition is a matter of tens then


def covariance_factors(statistics: ClassStatistics) -> tuple[Tensor, Tensor]:
    """Factors F_y of the class covariances, F_y^T F_y = Sigma_y, with one row for each direction of variance.

    The covariance of n samples has a rank of at most n - 1, so that a factor is smaller than the matrix where a class
    has fewer samples than features, and never larger. Rows belong to the eigenvectors of Sigma_y, the largest
    eigenvalue first; eigenvalues that are zero up to rounding have none, nor has a class of one sample or none.

    Args:
        statistics: one client's statistics, with covariances.

    Returns:
        factors: (R, d) float64, the rows of all classes one class after the other.
        ranks: (C,) int64, number of rows of each class, at most min(n_y - 1, d).

    Raises:
        RuntimeError: if the statistics are without covariances.
        torch.linalg.LinAlgError: if a covariance cannot be decomposed, for instance after an overflow.

    Example:
        Two samples span one direction, so that one row of three numbers stands for a (3, 3) covariance:

        >>> import torch
        >>> from pfl_lightning.functional import ClassStatistics, covariance_factors
        >>> statistics = ClassStatistics(num_classes=2, num_features=3)
        >>> statistics.update(torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]]), torch.tensor([0, 0]))
        >>> factors, ranks = covariance_factors(statistics)
        >>> factors.shape, ranks.tolist()
        (torch.Size([1, 3]), [1, 0])
        >>> factors.square().round(decimals=6)  # variance 2 along the first axis
        tensor([[2., 0., 0.]], dtype=torch.float64)
    """
    ranks = torch.zeros_like(statistics.counts)
    factors = [statistics.means.new_zeros(0, statistics.num_features)]
    counts = statistics.counts.tolist()
    for y, covariance in statistics.covariances_by_class().items():
        deviations, directions = _principal_axes(covariance, counts[y] - 1)
        factors.append(deviations.unsqueeze(1) * directions)
        ranks[y] = len(deviations)
    return torch.cat(factors), ranks


def covariances_by_class(factors: Tensor, ranks: Tensor, num_features: int) -> dict[int, Tensor]:
    """Covariances Sigma_y = F_y^T F_y of the classes that have rows; the inverse of :func:`covariance_factors`.

    Args:
        factors: (R, d) finite floating-point rows of all classes, one class after the other.
        ranks: (C,) integers >= 0 with sum R, the number of rows of each class.
        num_features: feature dimension d.

    Returns:
        (d, d) float64 by class, symmetric to the last digit, in the order of the classes.

    Raises:
        ValueError: if shapes do not fit together, ranks are not integers, negative or above d, or factors are not
            finite.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.gaussians import covariances_by_class
        >>> factors = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
        >>> covariances_by_class(factors, ranks=torch.tensor([2, 0, 1]), num_features=2)[2].tolist()
        [[1.0, 1.0], [1.0, 1.0]]
    """
    _check_factors(factors, ranks, num_features)
    rows = factors.detach().to(float64_device(factors.device), torch.float64).split(ranks.tolist())
    with one_thread():
        return {y: _self_product(own) for y, own in enumerate(rows) if len(own) > 0}


def sample_class_gaussians(
    statistics: ClassStatistics, total: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw virtual features of each class y from N(mu_y, Sigma_y) (DC-PFL, section 4.4).

    `total` is divided among the classes in proportion to their samples by largest remainders, and every class seen
    gets one at least. The root of a covariance is its symmetric one: it exists for any positive semidefinite matrix,
    so that the features of a singular covariance lie in the affine subspace of its samples, and it varies little with
    the matrix, so that rounding (another order of merging) changes the features as little.

    Args:
        statistics: pooled statistics with covariances, of at least one sample.
        total: number of features to draw, at least one for each class seen.
        generator: a CPU generator; the same state and statistics give the same features.

    Returns:
        features: (total, d) float64, in the order of the classes; of a class without covariance, exactly its mean.
        labels: (total,) int64.

    Raises:
        ValueError: if the statistics are empty or `total` is below the number of classes seen.
        RuntimeError: if the statistics are without covariances.
        torch.linalg.LinAlgError: if a covariance cannot be decomposed, for instance after an overflow.

    Example:
        Classes without variance give their means. Class 0 has three of four samples, and so three of four features:

        >>> import torch
        >>> from pfl_lightning.functional import ClassStatistics, sample_class_gaussians
        >>> statistics = ClassStatistics(num_classes=2, num_features=1)
        >>> statistics.update(torch.tensor([[5.0], [5.0], [5.0], [7.0]]), torch.tensor([0, 0, 0, 1]))
        >>> features, labels = sample_class_gaussians(statistics, total=4, generator=torch.Generator().manual_seed(0))
        >>> features.flatten().tolist(), labels.tolist()
        ([5.0, 5.0, 5.0, 7.0], [0, 0, 0, 1])
    """
    counts = statistics.counts.tolist()
    shares = _apportion(counts, total)
    means = statistics.means
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(shares)).to(means.device)
    # All the noise at once, so that what one class draws does not depend on the ranks of others.
    noise = torch.randn(total, statistics.num_features, generator=generator, dtype=torch.float64).to(means.device)
    noise_by_class = noise.split(shares)
    features = means[labels]
    features_by_class = features.split(shares)
    for y, covariance in statistics.covariances_by_class().items():
        deviations, directions = _principal_axes(covariance, counts[y] - 1)
        features_by_class[y].add_(noise_by_class[y] @ directions.T * deviations @ directions)
    return features, labels


def _self_product(rows: Tensor) -> Tensor:
    product = rows.T @ rows
    return (product + product.T).div_(2)  # a library may round mirror images differently


def _principal_axes(covariance: Tensor, max_rank: int) -> tuple[Tensor, Tensor]:
    """Standard deviations (r,), falling, and directions (r, d); without those that are zero up to rounding.

    Where the rank is known to be small, the matrix is decomposed within its own range, which random combinations of
    its columns span: exactly, up to rounding. Source: N. Halko, P. G. Martinsson and J. A. Tropp, Finding Structure
    with Randomness, SIAM Review 53(2), 2011.
    """
    size, columns = len(covariance), max_rank + OVERSAMPLING
    with one_thread():
        if 3 * columns > size:  # the sketch would gain little, or nothing
            variances, vectors = torch.linalg.eigh(covariance)
        else:
            generator = torch.Generator().manual_seed(0)
            mixing = torch.randn(size, columns, generator=generator, dtype=torch.float64).to(covariance.device)
            basis = torch.linalg.qr(covariance @ mixing).Q
            variances, within = torch.linalg.eigh(basis.T @ covariance @ basis)
            vectors = basis @ within
    variances, directions = variances.flip(0), vectors.T.flip(0)
    floor = torch.finfo(variances.dtype).eps * size * variances[0]
    rank = min(max_rank, int((variances > floor).sum()))  # leaves out negative ones, which are rounding too
    return variances[:rank].sqrt(), directions[:rank]


def _apportion(counts: list[int], total: int) -> list[int]:
    """Divide `total` in proportion to counts, at least one to each that is positive."""
    seen = [y for y, count in enumerate(counts) if count > 0]
    if not seen:
        raise ValueError("virtual features need at least one sample to resemble, got none")
    if total < len(seen):
        raise ValueError(f"expected at least one virtual feature for each of {len(seen)} classes seen, got {total}")
    shares = [0] * len(counts)
    # A class whose part is below one gets one; what it takes from the others may bring more of them below one.
    while small := [y for y in seen if total * counts[y] < sum(counts[z] for z in seen)]:
        for y in small:
            shares[y] = 1
        total -= len(small)
        seen = [y for y in seen if shares[y] == 0]
    samples = sum(counts[y] for y in seen)
    for y in seen:
        shares[y] = total * counts[y] // samples
    by_remainder = sorted(seen, key=lambda y: -(total * counts[y] % samples))  # stable: ties go to the lower class
    for y in by_remainder[: total - sum(shares[y] for y in seen)]:
        shares[y] += 1
    return shares


def _check_factors(factors: Tensor, ranks: Tensor, num_features: int) -> None:
    check_tensor("factors", factors, ("R", num_features))
    check_tensor("ranks", ranks, ("C",), "integers")
    for y, rank in enumerate(ranks.tolist()):
        if not 0 <= rank <= num_features:
            raise ValueError(f"ranks must lie in 0..{num_features}, got {rank} for class {y}")
    if int(ranks.sum()) != len(factors):
        raise ValueError(f"ranks must add up to the {len(factors)} rows of factors, got {int(ranks.sum())}")
    if not bool(factors.isfinite().all()):
        wrong = int((~factors.isfinite()).sum())
        raise ValueError(f"factors must be finite, got {wrong} non-finite values of {factors.numel()}")
