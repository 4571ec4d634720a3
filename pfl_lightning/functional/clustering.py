"""K-means: with a fixed number of iterations inside a training step, and to convergence on a whole data set.

All steps take B data sets of N points with S clusterings each. No shape depends on the data, so that `torch.func.vmap`
can run them, and no result on a branch. The clusters of all starts go into one product, which reads the points once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from pfl_lightning.functional.numerics import at_least_single, check_tensor, is_transformed, without_autocast

BLOCK_ELEMENTS = 2**22  # squared distances, or numbers of points, that a block of points has


class Clustering(NamedTuple):
    """Result of k-means. A named tuple, since `torch.func.vmap` can return it.

    Attributes:
        centroids: (K, d) or (B, K, d), in single precision at least.
        assignment: (N,) or (B, N) int64, the nearest centroid of each point. A cluster may be left without points,
            above all where fewer than K points differ.
        inertia: () or (B,), the sum of the squared distances of the points to their centroids.
    """

    centroids: Tensor
    assignment: Tensor
    inertia: Tensor


@torch.no_grad()
def kmeans(
    points: Tensor,
    num_clusters: int,
    *,
    iterations: int = 10,
    starts: int = 4,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
) -> Clustering:
    """Cluster a batch by a fixed number of Lloyd's iterations, for use inside a training step.

    No shape depends on the data, nor a branch under `torch.func` or on a device, so that it runs under
    `torch.func.vmap` (with `randomness="different"`, or `noise`) and never synchronizes a device; on the CPU it ends
    where nothing changes any more, with the same result. The results carry no gradient. Starts are drawn by greedy
    k-means++, improved together, and the one of the lowest inertia is returned. An empty cluster takes the point that
    is farthest from its centroid. Computed in single precision at least, also under autocast.

    On a few hundred points, four starts of ten iterations come closer to the best of many starts than one start that
    converges, with no more kernels.

    Args:
        points: (N, d), or (B, N, d) for B clusterings apart, with N >= K.
        num_clusters: K.
        iterations: Lloyd's iterations.
        starts: S, number of starts.
        generator: for the starts; the draws are made on its device. None: torch's default generator of the device of
            the points.
        noise: uniform draws in [0, 1) in its place, of shape (S, K, L), or (B, S, K, L) for batched points, with
            L = 2 + floor(log K) candidates for each further start.

    Raises:
        ValueError: if points are not floating point or of another shape, there are fewer than clusters, a number is too
            small, noise has another shape, or both a generator and noise are given.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import kmeans
        >>> points = torch.tensor([[0.0], [2.0], [10.0], [12.0]])
        >>> found = kmeans(points, num_clusters=2, generator=torch.Generator().manual_seed(0))
        >>> sorted(found.centroids.flatten().tolist()), float(found.inertia)  # every point is 1 from its centroid
        ([1.0, 11.0], 4.0)
        >>> bool(found.assignment[0] == found.assignment[1]), bool(found.assignment[1] == found.assignment[2])
        (True, False)
    """
    _check(points, points.ndim == 3, num_clusters, starts)
    if iterations < 0:
        raise ValueError(f"iterations must be at least 0, got {iterations}")
    batched = points if points.ndim == 3 else points.unsqueeze(0)
    if noise is None:
        noise = _draw(batched, num_clusters, starts, generator)
    else:
        if generator is not None:
            raise ValueError("noise replaces a generator, got both: leave one out")
        check_tensor("noise", noise, (*points.shape[:-2], starts, num_clusters, num_candidates(num_clusters)))
        noise = noise.to(points.device) if points.ndim == 3 else noise.to(points.device).unsqueeze(0)
    with without_autocast(points.device):
        around_origin, mean = _center(batched)
        centroids = choose_starts(around_origin, noise)
        for _ in range(iterations):
            before, centroids = centroids, improve(around_origin, centroids)
            if is_free_to_look(centroids) and torch.equal(before, centroids):
                break  # no further iteration would change them
        found = _best(around_origin, centroids, mean)
    return found if points.ndim == 3 else Clustering(*(part.squeeze(0) for part in found))


@torch.no_grad()
def fit_kmeans(
    points: Tensor,
    num_clusters: int,
    *,
    starts: int = 10,
    max_iterations: int = 300,
    tolerance: float = 1e-4,
    generator: torch.Generator | None = None,
) -> Clustering:
    """Cluster a data set to convergence, as scikit-learn's KMeans does.

    Starts by greedy k-means++, Lloyd's iterations, empty clusters and the stopping rule are those of :func:`kmeans`
    and scikit-learn; the starts run together, each until it has converged. Distances are held for a block of points
    at a time. The device is synchronized once an iteration.

    Args:
        points: (N, d), finite, with N >= K. Computed in single precision at least.
        num_clusters: K.
        starts: number of starts; the clustering of the lowest inertia is returned.
        max_iterations: number of iterations after which the search ends, converged or not.
        tolerance: a start has converged when its centroids' squared movements in an iteration add up to this share of
            the points' mean variance of a dimension, at most.
        generator: for the starts; None for torch's default one. A CPU generator gives every device the same draws.

    Raises:
        ValueError: if points are not floating point of shape (N, d) or not finite, there are fewer than clusters, or
            a number is too small.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import fit_kmeans
        >>> points = torch.tensor([[0.0, 0.0], [0.0, 2.0], [9.0, 9.0]])
        >>> found = fit_kmeans(points, num_clusters=2, generator=torch.Generator().manual_seed(0))
        >>> sorted(found.centroids.tolist()), float(found.inertia)
        ([[0.0, 1.0], [9.0, 9.0]], 2.0)
    """
    _check(points, False, num_clusters, starts)
    if max_iterations < 0 or not tolerance >= 0:
        raise ValueError(
            f"max_iterations and tolerance must be at least 0, got {max_iterations} and {tolerance}: "
            "with tolerance 0 a start runs until its centroids stop moving"
        )
    if not bool(points.isfinite().all()):
        wrong = int((~points.isfinite().all(1)).sum())
        raise ValueError(f"points must be finite, got {wrong} of {len(points)} that are not: has training diverged?")
    batched = points.unsqueeze(0)
    noise = _draw(batched, num_clusters, starts, generator)
    with without_autocast(points.device):
        around_origin, mean = _center(batched)
        bound = tolerance * around_origin.square_norms.mean() / points.shape[1]
        centroids = choose_starts(around_origin, noise)
        moving = torch.arange(starts, device=points.device)
        for _ in range(max_iterations):
            before = centroids[:, moving]
            after = improve(around_origin, before)
            centroids[:, moving] = after
            moving = moving[(after - before).square().sum((0, 2, 3)) > bound]
            if len(moving) == 0:
                break
        found = _best(around_origin, centroids, mean)
    return Clustering(*(part.squeeze(0) for part in found))


def _center(batched: Tensor) -> tuple[Points, Tensor]:
    """Data sets moved to the origin, for the sake of precision, and their means (B, 1, d)."""
    values = at_least_single(batched)
    mean = values.mean(1, keepdim=True)
    values = values - mean
    return Points(values, values.square().sum(-1)), mean


def _best(points: Points, centroids: Tensor, mean: Tensor) -> Clustering:
    """Clustering of the lowest inertia for each data set, moved back by its mean."""
    assignment, square_distances = nearest(points, centroids)
    best = square_distances.sum(-1).argmin(-1, keepdim=True)  # (B, 1)
    centroids = take(centroids.flatten(2), best).view_as(centroids[:, 0])
    assignment = take(assignment, best).squeeze(1)
    return Clustering(centroids + mean, assignment, points.inertia(centroids, assignment))


def _draw(batched: Tensor, num_clusters: int, starts: int, generator: torch.Generator | None) -> Tensor:
    shape = (len(batched), starts, num_clusters, num_candidates(num_clusters))
    device = batched.device if generator is None else generator.device
    return torch.rand(shape, generator=generator, device=device, dtype=torch.float32).to(batched.device)


def num_candidates(num_clusters: int) -> int:
    """L, points that compete for each further start: as scikit-learn, after Arthur and Vassilvitskii."""
    return 2 + int(math.log(num_clusters))


def _check(points: Tensor, batched: bool, num_clusters: int, starts: int) -> None:
    check_tensor("points", points, ("B", "N", "d") if batched else ("N", "d"))
    if num_clusters < 1 or starts < 1:
        raise ValueError(f"num_clusters and starts must be at least 1, got {num_clusters} and {starts}")
    if points.shape[-2] < num_clusters:
        raise ValueError(
            f"{num_clusters} clusters need at least as many points, got {points.shape[-2]}: "
            "ask for fewer clusters or give more points"
        )


class Points(NamedTuple):
    """Data sets around the origin: (B, N, d), and the squared norms (B, N) of their points."""

    values: Tensor
    square_norms: Tensor

    def blocks(self, columns: int) -> Iterator[Points]:
        """Split into blocks of n points, so that B times n times `columns` is bounded."""
        rows = self._rows(columns)
        for values, square_norms in zip(self.values.split(rows, 1), self.square_norms.split(rows, 1), strict=True):
            yield Points(values, square_norms)

    def inertia(self, centroids: Tensor, assignment: Tensor) -> Tensor:
        """Sum of the squared distances (B,) to the assigned ones (B, N) of centroids (B, K, d)."""
        rows = self._rows(self.values.shape[2])
        blocks = zip(self.values.split(rows, 1), assignment.split(rows, 1), strict=True)
        return torch.stack([(part - take(centroids, own)).square().sum((1, 2)) for part, own in blocks]).sum(0)

    def _rows(self, columns: int) -> int:
        return max(1, BLOCK_ELEMENTS // max(1, len(self.values) * columns))


class Nearest(NamedTuple):
    """Index of the nearest centroid of each point (B, S, N), and the squared distance to it."""

    assignment: Tensor
    square_distances: Tensor


def choose_starts(points: Points, noise: Tensor) -> Tensor:
    """Greedy k-means++: each further start is the best of L points drawn in proportion to their squared distances.

    Source: D. Arthur and S. Vassilvitskii, k-means++: The Advantages of Careful Seeding, SODA 2007, section 5.

    Args:
        points: B data sets.
        noise: (B, S, K, L) uniform draws in [0, 1).

    Returns:
        Centroids (B, S, K, d), each a point.
    """
    values, size = points.values, points.values.shape[1]
    first = (noise[:, :, 0, :1] * size).long().clamp(max=size - 1)
    centroids = [take(values, first)]  # (B, S, 1, d) each
    closest = _square_distances_in_blocks(points, centroids[0])  # (B, S, 1, N) to the nearest start so far
    for draw in noise.to(values.dtype).unbind(2)[1:]:
        cumulated = closest.squeeze(2).cumsum(-1)
        target = draw * cumulated[..., -1:]
        # The first point whose cumulated share lies above the draw; where all are zero, any point is as good.
        index = torch.searchsorted(cumulated, target, right=True).clamp(max=size - 1)
        candidates = take(values, index)  # (B, S, L, d)
        distances = torch.minimum(closest, _square_distances_in_blocks(points, candidates))
        best = distances.sum(-1).argmin(-1)
        closest = pick(distances, best)
        centroids.append(pick(candidates, best))
    return torch.cat(centroids, 2)


def nearest(points: Points, centroids: Tensor) -> Nearest:
    """Assign every point to its nearest centroid (B, S, K, d), the first one of equally near ones."""
    blocks = points.blocks(centroids.shape[1] * centroids.shape[2])
    return _joined([_nearest(block, centroids) for block in blocks])


def improve(points: Points, centroids: Tensor) -> Tensor:
    """One iteration of Lloyd: the means of the points that are nearest to each centroid.

    An empty cluster takes the point that is farthest from its centroid, a second one the second farthest, as in
    scikit-learn; the centroid of a cluster that is empty all the same (points that coincide) is unchanged.
    """
    starts, clusters = centroids.shape[1:3]
    found, sums, counts = list[Nearest](), list[Tensor](), list[Tensor]()
    for block in points.blocks(starts * clusters):
        found.append(_nearest(block, centroids))
        members = _one_hot(found[-1].assignment, clusters, centroids.dtype)  # (B, S, K, n)
        sums.append((members.flatten(1, 2) @ block.values).unflatten(1, (starts, clusters)))
        counts.append(members.sum(-1, keepdim=True))
    total, size = reduce(torch.add, sums), reduce(torch.add, counts)
    if not (is_free_to_look(size) and bool(size.all())):  # else there is nothing to fill
        total, size = _fill_empty(points.values, _joined(found), total, size)
    return torch.where(size > 0, total / size.clamp(min=1), centroids)


def is_free_to_look(values: Tensor) -> bool:
    """Whether a branch may depend on values: on the CPU, where nothing waits for it, and outside of `torch.func`."""
    return values.device.type == "cpu" and not is_transformed()


def take(values: Tensor, index: Tensor) -> Tensor:
    """Rows (B, ..., d) of values (B, N, d) by index (B, ...)."""
    entries = index.flatten(1).unsqueeze(-1).expand(-1, -1, values.shape[-1])
    rows: Tensor = values.gather(1, entries).unflatten(1, index.shape[1:])
    return rows


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """One row (B, S, 1, n) of each start's rows (B, S, R, n), by index (B, S)."""
    return rows.gather(2, index[..., None, None].expand(-1, -1, -1, rows.shape[-1]))


def _fill_empty(values: Tensor, assigned: Nearest, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Move the farthest points, one each, from their clusters to the empty ones."""
    clusters = counts.shape[2]
    empty = counts == 0  # (B, S, K, 1)
    farthest = assigned.square_distances.topk(clusters, -1).indices  # (B, S, K)
    rank = (empty.squeeze(-1).cumsum(-1) - 1).clamp(min=0)
    index = farthest.gather(-1, rank)  # the point that each cluster would take, were it empty
    losing = _one_hot(assigned.assignment.gather(-1, index), clusters, counts.dtype)
    # Column j: what the move to cluster j adds to each cluster.
    change = (torch.eye(clusters, dtype=counts.dtype, device=counts.device) - losing) * empty.mT
    return sums + change @ take(values, index), counts + change.sum(-1, keepdim=True)


def _nearest(points: Points, centroids: Tensor) -> Nearest:
    distances, assignment = _square_distances(points, centroids).min(2)
    return Nearest(assignment, distances)


def _joined(blocks: list[Nearest]) -> Nearest:
    if len(blocks) == 1:
        return blocks[0]
    return Nearest(*(torch.cat(parts, -1) for parts in zip(*blocks, strict=True)))


def _square_distances_in_blocks(points: Points, centroids: Tensor) -> Tensor:
    """Squared distances (B, S, K, N), not below zero, so that they can be weights of draws."""
    blocks = points.blocks(centroids.shape[1] * centroids.shape[2])
    return torch.cat([_square_distances(block, centroids) for block in blocks], -1).clamp(min=0)


def _square_distances(points: Points, centroids: Tensor) -> Tensor:
    """Squared distances (B, S, K, n), which rounding may take below zero."""
    flat = centroids.flatten(1, 2)
    squares = flat.square().sum(-1, keepdim=True) + points.square_norms.unsqueeze(1)
    distances: Tensor = (squares - 2 * (flat @ points.values.mT)).unflatten(1, centroids.shape[1:3])
    return distances


def _one_hot(assignment: Tensor, clusters: int, dtype: torch.dtype) -> Tensor:
    """Members of each cluster (B, S, K, n) from assignments (B, S, n)."""
    numbers = torch.arange(clusters, device=assignment.device).unsqueeze(-1)
    return (assignment.unsqueeze(2) == numbers).to(dtype)
