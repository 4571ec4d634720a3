"""Per-class statistics of features: counts, means, second moments, covariances."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pfl_lightning.functional.numerics import check_tensor, one_thread
from pfl_lightning.functional.tensor_lists import float64_device

ASYMMETRY = 1e-5  # of a covariance's largest entry; more than single precision leaves of a symmetric product


class ClassStatistics:
    """Counts, means and (if wanted) covariances of features per class, streamed over batches and merged exactly.

    Sums are kept in double precision around the running mean (Chan, Golub and LeVeque's pairwise update), so that
    neither the split into batches or clients nor a large common offset costs accuracy. Accumulators live on the
    device of the first batch (on the CPU where that device has no double precision); results are in double precision.

    Args:
        num_classes: number of classes C.
        num_features: feature dimension d.
        with_covariances: also accumulate scatter matrices, (d, d) for each class of two samples and more. FedPAC does
            not need them, DC-PFL does.

    Raises:
        ValueError: if there is no class or no feature.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import ClassStatistics
        >>> statistics = ClassStatistics(num_classes=2, num_features=1)
        >>> statistics.update(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0]))
        >>> statistics.means.tolist(), statistics.covariances.flatten().tolist()
        ([[2.0], [0.0]], [2.0, 0.0])

        Statistics of two clients, merged, are those of all their features:

        >>> other = ClassStatistics(num_classes=2, num_features=1)
        >>> other.update(torch.tensor([[5.0], [7.0]]), torch.tensor([0, 1]))
        >>> merged = statistics.merge(other)
        >>> merged.counts.tolist(), merged.means.tolist()  # class 0 has the features 1, 3 and 5
        ([3, 1], [[3.0], [7.0]])
        >>> merged.square_deviations.tolist()  # 2^2 + 0^2 + 2^2
        [8.0, 0.0]
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
        # By class, for those that need one: a client often has few of many classes, and a matrix each is large.
        self._scatters: dict[int, Tensor] = {}

    @classmethod
    def from_moments(
        cls,
        counts: Tensor,
        means: Tensor,
        covariances: Tensor | Mapping[int, Tensor] | None = None,
        square_deviations: Tensor | None = None,
    ) -> ClassStatistics:
        """Statistics from their moments: counts, means, and the deviations of the features from the means.

        A server restores and merges the uploads of its clients in this way. It then has the statistics of all their
        features together (DC-PFL, eqs. 10 and 11), up to rounding (of the upload as well, if in single precision).

        Args:
            counts: (C,) integers >= 0.
            means: (C, d); of a class without samples they are ignored.
            covariances: (C, d, d) unbiased covariances, or (d, d) by class: those left out are zero and cost nothing.
                Zero for a class of one sample or none.
            square_deviations: (C,) sums over a class of ||f - mu_y||^2, in place of covariances; zero for a class of
                one sample or none. The result is `with_covariances=False` then.

        Returns:
            Statistics on the device of `means`, in double precision; they share no memory with the arguments.

        Raises:
            ValueError: unless exactly one of covariances and square_deviations is given; if shapes do not fit
                together, a class is unknown, counts are not integers or negative, anything is not finite, or
                deviations are impossible:
                a covariance that is not symmetric or has a negative variance, a negative square deviation, or one
                that is not zero though the class has less than two samples. The message names the class and the size
                of the violation. Positive semidefiniteness is not checked.

        Example:
            >>> import torch
            >>> counts, means = torch.tensor([2, 1]), torch.tensor([[2.0], [7.0]])
            >>> statistics = ClassStatistics.from_moments(counts, means, square_deviations=torch.tensor([2.0, 0.0]))
            >>> statistics.square_deviations.tolist()
            [2.0, 0.0]
        """
        by_class = _check_moments(counts, means, covariances, square_deviations)
        result = cls(means.shape[0], means.shape[1], with_covariances=covariances is not None)
        device = float64_device(means.device)
        counts = counts.detach().to(device=device, dtype=torch.int64)
        values = means.detach().to(device=device, dtype=torch.float64)
        result._counts = counts.clone()
        result._means = torch.where(counts.unsqueeze(1) > 0, values, 0.0)
        if square_deviations is not None:
            result._square_deviations = square_deviations.detach().to(device, torch.float64, copy=True)
        if covariances is not None:
            result._square_deviations = result._means.new_zeros(len(counts))
            for y in (y for y in (counts > 1).nonzero().flatten().tolist() if y in by_class):
                scatter = by_class[y].detach().to(device, torch.float64) * (counts[y] - 1)
                result._scatters[y] = (scatter + scatter.T) / 2  # exactly symmetric, whatever the transport did
                result._square_deviations[y] = scatter.trace().clamp(min=0.0)
        return result

    @property
    def counts(self) -> Tensor:
        """Samples of each class, (C,) int64."""
        return self._counts.clone()

    @property
    def means(self) -> Tensor:
        """Mean feature of each class, (C, d) float64; zero for a class without samples."""
        return self._means.clone()

    @property
    def square_deviations(self) -> Tensor:
        """Sum over each class of ||f - mu_y||^2, the trace of its scatter matrix, (C,) float64."""
        return self._square_deviations.clone()

    @property
    def covariances(self) -> Tensor:
        """Unbiased covariance of each class, (C, d, d) float64; zero for a class of one sample or none.

        Raises:
            RuntimeError: if constructed with `with_covariances=False`.
        """
        covariances = self._means.new_zeros(self.num_classes, self.num_features, self.num_features)
        for y, covariance in self.covariances_by_class().items():
            covariances[y] = covariance
        return covariances

    def covariances_by_class(self) -> dict[int, Tensor]:
        """Unbiased covariances of the classes with at least two samples; those of the others are zero.

        Returns:
            (d, d) float64 by class, in the order of the classes.

        Raises:
            RuntimeError: if constructed with `with_covariances=False`.
        """
        if not self.with_covariances:
            raise RuntimeError(
                "covariances were not accumulated: construct ClassStatistics(..., with_covariances=True)"
            )
        return {y: self._scatters[y] / (self._counts[y] - 1) for y in sorted(self._scatters)}

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
        _check_batch(features, labels, self.num_classes, self.num_features)
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
        """Merge other statistics into these, in place, and return self.

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

    def _absorb(self, counts: Tensor, means: Tensor, square_deviations: Tensor, scatters: Mapping[int, Tensor]) -> None:
        """Merge moments around their own means into mine (Chan et al.)."""
        device = self._means.device if bool(self._counts.any()) else means.device
        own = self._counts, self._means, self._square_deviations  # zero where they are elsewhere
        self._counts, self._means, self._square_deviations = (mine.to(device) for mine in own)
        counts, means = counts.to(device), means.to(device)
        total = self._counts + counts
        # n_b / n; integers alone would divide in single precision
        share = counts.to(torch.float64) / total.clamp(min=1)
        shift = means - self._means
        between = self._counts * share  # n_a n_b / n
        # Classes that were empty on one side: share is 0 or 1, the shift vanishes from the scatter as it should.
        self._square_deviations = (
            self._square_deviations + square_deviations.to(device) + between * shift.square().sum(dim=1)
        )
        if self.with_covariances:
            shifts = shift * between.sqrt().unsqueeze(1)
            for y in ((counts > 0) & (total > 1)).nonzero().flatten().tolist():
                mine = self._scatters[y] if y in self._scatters else shifts.new_zeros(shifts.shape[1], shifts.shape[1])
                if y in scatters:
                    mine += scatters[y].to(device)
                self._scatters[y] = mine.addr_(shifts[y], shifts[y])
        self._means = self._means + shift * share.unsqueeze(1)
        self._counts = total

    def _scatter(self, centered: Tensor, labels: Tensor) -> dict[int, Tensor]:
        if not self.with_covariances:
            return {}
        by_class = centered[labels.argsort()].split(torch.bincount(labels, minlength=self.num_classes).tolist())
        # the scatter of one sample is zero exactly
        return {y: rows.T @ rows for y, rows in enumerate(by_class) if len(rows) > 1}


def _check_batch(features: Tensor, labels: Tensor, num_classes: int, num_features: int) -> None:
    check_tensor("features", features, ("N", num_features))
    check_tensor("labels", labels, (len(features),), "integers")
    if labels.numel() > 0:
        low, high = (int(bound) for bound in torch.aminmax(labels))
        if low < 0 or high >= num_classes:
            raise ValueError(f"labels must lie in 0..{num_classes - 1}, got values from {low} to {high}")


def _check_moments(
    counts: Tensor, means: Tensor, covariances: Tensor | Mapping[int, Tensor] | None, square_deviations: Tensor | None
) -> dict[int, Tensor]:
    """Refuse moments that no features have, as far as can be told without a decomposition.

    Returns:
        The covariances by class; empty if they were not given.
    """
    if (covariances is None) == (square_deviations is None):
        given = "neither" if covariances is None else "both"
        raise ValueError(f"expected either covariances or square_deviations, got {given}")
    check_tensor("means", means, ("classes", "features"))
    num_classes, num_features = means.shape
    check_tensor("counts", counts, (num_classes,), "integers")
    _refuse("counts must not be negative", counts, counts < 0)
    _refuse("means must be finite", means, ~means.isfinite().all(dim=1))
    if square_deviations is not None:
        check_tensor("square_deviations", square_deviations, (num_classes,))
        fine = square_deviations.isfinite() & (square_deviations >= 0)
        _refuse("square_deviations must be finite and >= 0", square_deviations, ~fine)
        single = counts.to(square_deviations.device) < 2
        what = "the square deviation of less than two samples is zero"
        _refuse(what, square_deviations, single & (square_deviations != 0))
    if isinstance(covariances, Tensor):
        check_tensor("covariances", covariances, (num_classes, num_features, num_features))
        covariances = dict(enumerate(covariances))
    numbers = counts.tolist()
    for y, covariance in (covariances or {}).items():
        if not 0 <= y < num_classes:
            raise ValueError(f"covariances must be of classes in 0..{num_classes - 1}, got class {y}")
        check_tensor(f"the covariance of class {y}", covariance, (num_features, num_features))
        _check_covariance(y, numbers[y], covariance)
    return dict(covariances or {})


def _check_covariance(y: int, count: int, covariance: Tensor) -> None:
    size = float(torch.stack(torch.aminmax(covariance)).abs().max())  # NaN where an entry is, which no bound holds for
    asymmetry, least = float((covariance - covariance.T).max()), float(covariance.diagonal().min())
    rounding = ASYMMETRY * size
    fits = size == 0 if count < 2 else size < torch.inf and asymmetry <= rounding and least >= -rounding
    if not fits:
        raise ValueError(
            f"the covariance of class {y} ({count} samples) must be finite and symmetric, with variances >= 0, and "
            f"zero for fewer than two samples; got a largest entry of {size:.3g}, an asymmetry of {asymmetry:.3g} "
            f"and a smallest variance of {least:.3g}"
        )


def _refuse(what: str, values: Tensor, wrong: Tensor) -> None:
    """Refuse the values (C, ...) of the first class for which ``wrong`` (C,) is true."""
    for y in wrong.nonzero().flatten().tolist()[:1]:
        shown = values[y].tolist() if values[y].numel() <= 20 else f"values of shape {tuple(values[y].shape)}"
        raise ValueError(f"{what}, got {shown} for class {y}")
