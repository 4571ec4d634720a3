"""K-means: with a fixed number of iterations inside a training step, and to convergence on a whole data set."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pfl_lightning.functional.clustering.steps import Points, choose_starts, improve, is_free_to_look, nearest, take
from pfl_lightning.functional.numerics import at_least_single, without_autocast


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
    _check(points, (2, 3), num_clusters, starts)
    if iterations < 0:
        raise ValueError(f"iterations must be at least 0, got {iterations}")
    batched = points if points.ndim == 3 else points.unsqueeze(0)
    if noise is None:
        noise = _draw(batched, num_clusters, starts, generator)
    else:
        _check_noise(noise, points, num_clusters, starts, generator)
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
    _check(points, (2,), num_clusters, starts)
    if max_iterations < 0 or not tolerance >= 0:
        raise ValueError(
            f"max_iterations and tolerance must be at least 0, got {max_iterations} and {tolerance}: "
            "with tolerance 0 a start goes on until its centroids stand still"
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
    shape = (len(batched), starts, num_clusters, _num_candidates(num_clusters))
    device = batched.device if generator is None else generator.device
    return torch.rand(shape, generator=generator, device=device, dtype=torch.float32).to(batched.device)


def _num_candidates(num_clusters: int) -> int:
    return 2 + int(math.log(num_clusters))  # as scikit-learn, after Arthur and Vassilvitskii


def _check(points: Tensor, dimensions: tuple[int, ...], num_clusters: int, starts: int) -> None:
    if points.ndim not in dimensions or not points.is_floating_point():
        shapes = " or ".join({2: "(N, d)", 3: "(B, N, d)"}[number] for number in dimensions)
        raise ValueError(
            f"points must be floating point of shape {shapes}, got {points.dtype} of shape {tuple(points.shape)}"
        )
    if num_clusters < 1 or starts < 1:
        raise ValueError(f"num_clusters and starts must be at least 1, got {num_clusters} and {starts}")
    if points.shape[-2] < num_clusters:
        raise ValueError(
            f"{num_clusters} clusters need at least as many points, got {points.shape[-2]}: "
            "ask for fewer clusters or give more points"
        )


def _check_noise(
    noise: Tensor, points: Tensor, num_clusters: int, starts: int, generator: torch.Generator | None
) -> None:
    if generator is not None:
        raise ValueError("noise takes the place of a generator, got both: leave one out")
    expected = (*points.shape[:-2], starts, num_clusters, _num_candidates(num_clusters))
    if noise.shape != expected or not noise.is_floating_point():
        raise ValueError(
            f"noise must be floating point of shape {expected} for points of shape {tuple(points.shape)}, "
            f"got {noise.dtype} of shape {tuple(noise.shape)}"
        )
