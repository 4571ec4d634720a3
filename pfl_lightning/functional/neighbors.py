"""Nearest neighbors among features: accuracy of the nearest one, and probabilities of the k nearest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.functional.numerics import check_tensor
from pfl_lightning.functional.tensor_lists import float64_device

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
    check_tensor("features", features, ("N", "d"))
    check_tensor("test_features", test_features, ("M", features.shape[1]))
    check_tensor("labels", labels, (len(features),), "integers")
    check_tensor("test_labels", test_labels, (len(test_features),), "integers")
    if len(features) == 0 or len(test_features) == 0:
        raise ValueError(f"there must be samples, got {len(features)} to compare with and {len(test_features)} to test")
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


@torch.no_grad()
def neighbor_probabilities(
    features: Tensor,
    labels: Tensor,
    queries: Tensor,
    num_classes: int,
    *,
    neighbors: int = 10,
    scale: float = 1.0,
    squared: bool = True,
) -> Tensor:
    """Probabilities of the classes, p(y) proportional to the sum of e^(-distance / scale) over neighbors of class y.

    Distances are computed in double precision; of samples that are equally near, up to its rounding, the first ones
    count. The exponentials are a softmax over the neighbors, so that a query that is far from all of them has
    probabilities, too.

    Args:
        features: (N, d) of the known samples, N >= 1.
        labels: (N,) their classes.
        queries: (M, d).
        num_classes: Number of classes, C.
        neighbors: Number of neighbors, k; all samples where there are fewer.
        scale: What distances are divided by; positive, infinity for neighbors that count the same.
        squared: Whether distances are squared Euclidean ones.

    Returns:
        Probabilities, (M, C), float64.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import neighbor_probabilities
        >>> features, labels = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([0, 1, 1])
        >>> neighbor_probabilities(features, labels, torch.tensor([[0.5]]), 2, neighbors=2)
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    device = float64_device(features.device)
    known, classes, asked = features.to(device, torch.float64), labels.to(device), queries.to(device, torch.float64)
    center = known.mean(dim=0)  # moved to the origin, so that as little as possible cancels
    known, asked = known - center, asked - center
    squares, own = known.square().sum(dim=1), asked.square().sum(dim=1, keepdim=True)
    distances = (own + squares - 2 * (asked @ known.T)).clamp(min=0)
    # A product may round equal rows differently, by where they lie in it: what differs by no more counts as equal.
    unit = (64 * torch.finfo(torch.float64).eps * (own + squares.amax())).clamp(min=torch.finfo(torch.float64).tiny)
    distances = (distances / unit).round() * unit
    places = _nearest_places(distances, min(neighbors, len(known)))
    nearest, order = distances.gather(1, places).sort(dim=1, stable=True)
    places = places.gather(1, order)
    weights = torch.softmax(-(nearest if squared else nearest.sqrt()) / scale, dim=1)
    return torch.einsum("mk,mkc->mc", weights, F.one_hot(classes[places], num_classes).to(weights))


def _nearest_places(distances: Tensor, count: int) -> Tensor:
    """Places (M, count) of the least distances (M, N) of each row, ascending; of equal ones the first count."""
    compared = distances.nan_to_num(nan=torch.inf, posinf=torch.inf)
    last = compared.topk(count, dim=1, largest=False).values.amax(dim=1, keepdim=True)
    nearer, tied = compared < last, compared == last
    chosen = nearer | (tied & (tied.cumsum(1, dtype=torch.int32) <= count - nearer.sum(1, keepdim=True)))
    total = distances.shape[1]
    # Not nonzero, whose result has another shape for each client under vmap.
    numbered = torch.where(chosen, torch.arange(total, device=distances.device), total)
    return numbered.topk(count, dim=1, largest=False, sorted=True).values
