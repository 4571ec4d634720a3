"""Checks of the input of class statistics: batches of features, and moments computed elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ASYMMETRY = 1e-5  # of a covariance's largest entry; more than single precision leaves of a symmetric product


def check_batch(features: Tensor, labels: Tensor, num_classes: int, num_features: int) -> None:
    """Refuse a batch of wrong shapes or types, or with labels out of range.

    Raises:
        ValueError: on a wrong shape or type, or a label out of range; it names the expected and the given one.
    """
    if features.ndim != 2 or features.shape[1] != num_features or not features.is_floating_point():
        raise ValueError(
            f"features must be floating point of shape (N, {num_features}), "
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
    if low < 0 or high >= num_classes:
        raise ValueError(f"labels must lie in 0..{num_classes - 1}, got values from {low} to {high}")


def check_moments(
    counts: Tensor, means: Tensor, covariances: Tensor | Mapping[int, Tensor] | None, square_deviations: Tensor | None
) -> dict[int, Tensor]:
    """Refuse moments that no features have, as far as can be told without a decomposition.

    Returns:
        The covariances by class; empty if they were not given.

    Raises:
        ValueError: names the class and the size of the violation.
    """
    if (covariances is None) == (square_deviations is None):
        given = "neither" if covariances is None else "both"
        raise ValueError(f"expected either covariances or square_deviations, got {given}")
    _check_means(counts, means)
    if square_deviations is not None:
        _check_square_deviations(counts, square_deviations)
    if covariances is None:
        return {}
    by_class = _by_class(covariances, *means.shape)
    numbers = counts.tolist()
    for y, covariance in by_class.items():
        _check_covariance(y, numbers[y], covariance)
    return by_class


def _by_class(covariances: Tensor | Mapping[int, Tensor], num_classes: int, num_features: int) -> dict[int, Tensor]:
    if isinstance(covariances, Tensor):
        _check_shape("covariances", covariances, (num_classes, num_features, num_features))
        return dict(enumerate(covariances))
    for y, covariance in covariances.items():
        if not 0 <= y < num_classes:
            raise ValueError(f"covariances must be of classes in 0..{num_classes - 1}, got class {y}")
        _check_shape(f"the covariance of class {y}", covariance, (num_features, num_features))
    return dict(covariances)


def _check_means(counts: Tensor, means: Tensor) -> None:
    if means.ndim != 2 or 0 in means.shape or not means.is_floating_point():
        raise ValueError(
            "means must be floating point of shape (classes, features), none of them zero, "
            f"got {means.dtype} of shape {tuple(means.shape)}"
        )
    integers = not (counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool)
    if counts.shape != means.shape[:1] or not integers:
        raise ValueError(
            f"counts must be integers of shape ({means.shape[0]},), got {counts.dtype} of shape {tuple(counts.shape)}"
        )
    y = _first(counts < 0)
    if y is not None:
        raise ValueError(f"counts must not be negative, got {int(counts[y])} for class {y}")
    y = _first(~means.isfinite().all(dim=1))
    if y is not None:
        wrong = int((~means[y].isfinite()).sum())
        raise ValueError(f"means must be finite, got {wrong} non-finite values of {means.shape[1]} for class {y}")


def _check_square_deviations(counts: Tensor, square_deviations: Tensor) -> None:
    _check_shape("square_deviations", square_deviations, tuple(counts.shape))
    fine = square_deviations.isfinite() & (square_deviations >= 0)
    y = _first(~fine)
    if y is not None:
        raise ValueError(f"square_deviations must be finite and >= 0, got {float(square_deviations[y])} for class {y}")
    y = _first((counts.to(square_deviations.device) < 2) & (square_deviations != 0))
    if y is not None:
        raise ValueError(
            f"the square deviation of less than two samples is zero, got {float(square_deviations[y])} for class {y} "
            f"of {int(counts[y])} samples"
        )


def _check_covariance(y: int, count: int, covariance: Tensor) -> None:
    low, high = (float(bound) for bound in torch.aminmax(covariance))
    size = max(-low, high)
    if not (size < torch.inf):  # NaN comes out of aminmax, and fails every comparison
        wrong = int((~covariance.isfinite()).sum())
        raise ValueError(
            f"covariances must be finite, got {wrong} non-finite values of {covariance.numel()} for class {y}"
        )
    if count < 2:
        if size > 0:
            raise ValueError(
                f"the covariance of less than two samples is zero, got entries up to {size:.3g} for class {y} "
                f"of {count} samples"
            )
        return
    asymmetry = float((covariance - covariance.T).max())  # of either sign once
    if asymmetry > ASYMMETRY * size:
        raise ValueError(
            f"covariances must be symmetric, got entries that differ by {asymmetry:.3g} from their mirror image for "
            f"class {y}, whose largest entry is {size:.3g}"
        )
    least = float(covariance.diagonal().min())
    if least < -ASYMMETRY * size:
        raise ValueError(f"variances must not be negative, got {least:.3g} for class {y}")


def _check_shape(name: str, values: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(values.shape) != expected or not values.is_floating_point():
        raise ValueError(
            f"{name} must be floating point of shape {expected}, got {values.dtype} of shape {tuple(values.shape)}"
        )


def _first(mask: Tensor) -> int | None:
    found = mask.nonzero()
    return int(found[0]) if len(found) > 0 else None
