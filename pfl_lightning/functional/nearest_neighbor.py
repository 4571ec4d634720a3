"""Accuracy of a nearest-neighbor classifier on features, for encoders that have no head yet."""

from __future__ import annotations

import torch
from torch import Tensor

from pfl_lightning.functional.numerics import float64_device

BLOCK_ELEMENTS = 2**22  # distances held at the same time, 32 MiB


@torch.no_grad()
def nearest_neighbor_accuracy(features: Tensor, labels: Tensor, test_features: Tensor, test_labels: Tensor) -> Tensor:
    """Accuracy of the 1-nearest-neighbor classifier: the share of test samples whose nearest sample has their class.

    The distance is Euclidean, as in the published code of Calibre; on features divided by their norm it gives the order
    of cosine similarity. Distances are computed in double precision for a block of test samples at a time. Of
    equally near training samples, up to the rounding of double precision, the first one counts. Features that are not
    finite carry no information: such a training sample is left out, and such a test sample counts as wrong.

    Args:
        features: (N, d) of the training samples, N >= 1.
        labels: (N,) their classes, integers.
        test_features: (M, d), M >= 1.
        test_labels: (M,) their classes, integers.

    Returns:
        A scalar in 0..1, float64.

    Raises:
        ValueError: if shapes do not fit together, there are no samples, features are not floating point, or labels are
            not integers.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import nearest_neighbor_accuracy
        >>> features, labels = torch.tensor([[0.0], [10.0]]), torch.tensor([0, 1])
        >>> test_features = torch.tensor([[1.0], [9.0], [4.0], [6.0]])
        >>> nearest_neighbor_accuracy(features, labels, test_features, torch.tensor([0, 1, 0, 0]))  # 3 of 4
        tensor(0.7500, dtype=torch.float64)
    """
    _check(features, labels, "features", "labels")
    _check(test_features, test_labels, "test_features", "test_labels")
    if test_features.shape[1] != features.shape[1]:
        raise ValueError(
            f"test_features must have the {features.shape[1]} features of the training samples, "
            f"got {test_features.shape[1]}: do they come from the same encoder?"
        )
    device = float64_device(features.device)
    known, classes = features.to(device, torch.float64), labels.to(device)
    usable = known.isfinite().all(dim=1)
    known, classes, expected = known[usable], classes[usable], test_labels.to(device)
    correct = torch.zeros((), dtype=torch.float64, device=device)
    if len(known) == 0:
        return correct
    center = known.mean(dim=0)  # moved to the origin, so that as little as possible cancels
    known = known - center
    rows = max(1, BLOCK_ELEMENTS // len(known))
    for block, truth in zip(test_features.split(rows), expected.split(rows), strict=True):
        queries = block.to(device, torch.float64) - center
        correct_here = (classes[_nearest(known, queries)] == truth) & queries.isfinite().all(dim=1)
        correct += correct_here.sum()
    return correct / len(expected)


def _nearest(known: Tensor, queries: Tensor) -> Tensor:
    """Index (M,) of the row of `known` that is nearest to each query, the first one of ties.

    Computed in double precision, which autocast does not touch.
    """
    squares, own = known.square().sum(dim=1), queries.square().sum(dim=1, keepdim=True)
    distances = squares - 2 * (queries @ known.T)  # but for ||q||^2, which is the same for all
    # A product may round equal rows differently, by where they lie in it: none whose distance may be the least is out.
    rounding = 16 * torch.finfo(distances.dtype).eps * (own + squares)
    least = (distances + rounding).amin(dim=1, keepdim=True)
    return (distances - rounding <= least).to(torch.uint8).argmax(dim=1)


def _check(features: Tensor, labels: Tensor, name: str, name_of_labels: str) -> None:
    if features.ndim != 2 or len(features) == 0 or not features.is_floating_point():
        raise ValueError(
            f"{name} must be floating point of shape (N, d) with N >= 1, "
            f"got {features.dtype} of shape {tuple(features.shape)}"
        )
    if labels.shape != features.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"{name_of_labels} must be integer classes of shape ({features.shape[0]},), "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
