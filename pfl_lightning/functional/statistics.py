"""Per-class statistics of features: counts, means, second moments, covariances."""

from __future__ import annotations

import torch
from torch import Tensor

from pfl_lightning.functional._numerics import float64_device, one_thread


class ClassStatistics:
    """Counts, means and (if wanted) covariances of features per class, streamed over batches and merged exactly.

    Sums are kept in double precision around the running mean (Chan, Golub and LeVeque's pairwise update), so that
    neither the split into batches or clients nor a large common offset costs accuracy. Accumulators live on the
    device of the first batch (on the CPU where that device has no double precision); results are double.

    Args:
        num_classes: number of classes C.
        num_features: feature dimension d.
        with_covariances: also accumulate the (C, d, d) scatter matrices. FedPAC does not need them, DC-PFL does.

    Example:
        >>> statistics = ClassStatistics(num_classes=2, num_features=1)
        >>> statistics.update(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0]))
        >>> statistics.means.tolist(), statistics.covariances.flatten().tolist()
        ([[2.0], [0.0]], [2.0, 0.0])
    """

    def __init__(self, num_classes: int, num_features: int, with_covariances: bool = True) -> None:
        if num_classes < 1 or num_features < 1:
            raise ValueError(f"expected at least one class and one feature, got {num_classes} and {num_features}")
        self.num_classes = num_classes
        self.num_features = num_features
        self.with_covariances = with_covariances
        self._counts = torch.zeros(num_classes, dtype=torch.int64)
        self._means = torch.zeros(num_classes, num_features, dtype=torch.float64)
        self._square_deviations = torch.zeros(num_classes, dtype=torch.float64)
        self._scatters = self._zero_scatters(torch.device("cpu"))

    @property
    def counts(self) -> Tensor:
        """(C,) int64, samples of each class."""
        return self._counts.clone()

    @property
    def means(self) -> Tensor:
        """(C, d) float64, mean feature of each class; zero for a class without samples."""
        return self._means.clone()

    @property
    def square_deviations(self) -> Tensor:
        """(C,) float64, sum over a class of ||f - mu_y||^2; the trace of its scatter matrix."""
        return self._square_deviations.clone()

    @property
    def mean_square(self) -> Tensor:
        """(C,) float64, E[||f||^2 | y] = tr E[f f^T | y]; zero for a class without samples."""
        samples = self._counts.clamp(min=1)
        return self._square_deviations / samples + self._means.square().sum(dim=1)

    @property
    def covariances(self) -> Tensor:
        """(C, d, d) float64, unbiased covariance of each class; zero for a class of one sample or none.

        Raises:
            RuntimeError: if constructed with `with_covariances=False`.
        """
        if self._scatters is None:
            raise RuntimeError(
                "covariances were not accumulated: construct ClassStatistics(..., with_covariances=True)"
            )
        # The scatter of a single sample is exactly zero, so dividing by one instead of zero is right there.
        degrees = (self._counts - 1).clamp(min=1).to(torch.float64)
        return self._scatters / degrees[:, None, None]

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        """Add one batch.

        Args:
            features: (N, d) finite floating-point features; N may be zero.
            labels: (N,) integer classes in 0..C-1.

        Raises:
            ValueError: on wrong shapes, non-integer or out-of-range labels, or non-finite features; the statistics
                are unchanged then.
        """
        self._check_batch(features, labels)
        if features.shape[0] == 0:
            return
        with one_thread():
            self._add(features, labels)

    def _add(self, features: Tensor, labels: Tensor) -> None:
        device = float64_device(features.device)
        labels = labels.to(device=device, dtype=torch.int64)
        values = features.detach().to(device=device, dtype=torch.float64)
        one_hot = torch.zeros(self.num_classes, len(labels), dtype=torch.float64, device=device)
        one_hot[labels, torch.arange(len(labels), device=device)] = 1.0
        counts = one_hot.sum(dim=1)
        sums = one_hot @ values
        if not bool(sums.isfinite().all()):
            rows = (~features.isfinite().all(dim=1)).nonzero().flatten().tolist()
            raise ValueError(f"features must be finite, got NaN or infinity in {len(rows)} samples, first {rows[:5]}")
        samples = counts.clamp(min=1.0).unsqueeze(1)
        means = sums / samples
        values = values - means[labels]
        correction = (one_hot @ values) / samples  # what rounding left out of the mean; matters for large offsets
        means += correction
        values -= correction[labels]
        self._absorb(counts.to(torch.int64), means, one_hot @ values.square().sum(dim=1), self._scatter(values, labels))

    @torch.no_grad()
    def merge(self, *others: ClassStatistics) -> ClassStatistics:
        """Add what others have seen, in place, and return self.

        The result is that of one accumulator that has seen all the features, up to rounding (1e-9 and better).

        Args:
            others: accumulators of the same classes and features; they stay as they are.

        Raises:
            ValueError: if classes, features, or the wish for covariances differ; self is unchanged then.
        """
        for other in others:
            mine = (self.num_classes, self.num_features, self.with_covariances)
            theirs = (other.num_classes, other.num_features, other.with_covariances)
            if mine != theirs:
                raise ValueError(
                    "only statistics of the same kind can be merged: expected (num_classes, num_features, "
                    f"with_covariances) = {mine}, got {theirs}"
                )
        for other in others:
            self._absorb(other._counts, other._means, other._square_deviations, other._scatters)
        return self

    def _absorb(self, counts: Tensor, means: Tensor, square_deviations: Tensor, scatters: Tensor | None) -> None:
        """Merge moments around their own means into mine (Chan et al.)."""
        if not bool(self._counts.any()):
            self._move(means.device)
        device = self._means.device
        counts, means = counts.to(device), means.to(device)
        total = self._counts + counts
        share = counts.to(torch.float64) / total.clamp(
            min=1
        )  # n_b / n; integers alone would divide in single precision
        shift = means - self._means
        between = self._counts * share  # n_a n_b / n
        # Classes that were empty on one side: share is 0 or 1, the shift vanishes from the scatter as it should.
        self._square_deviations = (
            self._square_deviations + square_deviations.to(device) + between * shift.square().sum(dim=1)
        )
        if self._scatters is not None and scatters is not None:
            outer = (shift * between.unsqueeze(1)).unsqueeze(2) * shift.unsqueeze(1)
            self._scatters = self._scatters + scatters.to(device) + outer
        self._means = self._means + shift * share.unsqueeze(1)
        self._counts = total

    def _scatter(self, centred: Tensor, labels: Tensor) -> Tensor | None:
        scatters = self._zero_scatters(centred.device)
        if scatters is not None:
            by_class = centred[labels.argsort()].split(torch.bincount(labels, minlength=self.num_classes).tolist())
            for scatter, rows in zip(scatters, by_class, strict=True):
                if len(rows) > 1:  # the scatter of one sample is zero exactly
                    torch.mm(rows.T, rows, out=scatter)
        return scatters

    def _zero_scatters(self, device: torch.device) -> Tensor | None:
        if not self.with_covariances:
            return None
        shape = (self.num_classes, self.num_features, self.num_features)
        return torch.zeros(shape, dtype=torch.float64, device=device)

    def _move(self, device: torch.device) -> None:
        self._counts, self._means = self._counts.to(device), self._means.to(device)
        self._square_deviations = self._square_deviations.to(device)
        self._scatters = None if self._scatters is None else self._scatters.to(device)

    def _check_batch(self, features: Tensor, labels: Tensor) -> None:
        if features.ndim != 2 or features.shape[1] != self.num_features or not features.is_floating_point():
            raise ValueError(
                f"features must be floating point of shape (N, {self.num_features}), "
                f"got {features.dtype} of shape {tuple(features.shape)}"
            )
        if labels.shape != features.shape[:1] or labels.is_floating_point() or labels.is_complex():
            raise ValueError(
                f"labels must be integers of shape ({features.shape[0]},), "
                f"got {labels.dtype} of shape {tuple(labels.shape)}"
            )
        if labels.numel() == 0:
            return
        low, high = (int(bound) for bound in torch.aminmax(labels))
        if low < 0 or high >= self.num_classes:
            raise ValueError(f"labels must lie in 0..{self.num_classes - 1}, got values from {low} to {high}")


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
