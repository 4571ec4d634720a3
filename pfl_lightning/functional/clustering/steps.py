"""The steps of k-means: start, assignment, update.

All take B data sets of N points with S clusterings each. No shape depends on the data, so that `torch.func.vmap` can
run them, and no result on a branch. The clusters of all starts go into one product, which reads the points once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from pfl_lightning.functional.numerics import is_transformed

BLOCK_ELEMENTS = 2**22  # squared distances, or numbers of points, that a block of points has


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
    """Assign every point to its nearest centroid, the first one of equally near ones.

    Args:
        points: B data sets.
        centroids: (B, S, K, d).
    """
    blocks = points.blocks(centroids.shape[1] * centroids.shape[2])
    return _joined([_nearest(block, centroids) for block in blocks])


def improve(points: Points, centroids: Tensor) -> Tensor:
    """One iteration of Lloyd: the means of the points that are nearest to each centroid.

    An empty cluster takes the point that is farthest from its centroid, a second one the second farthest, as in
    scikit-learn.

    Args:
        points: B data sets.
        centroids: (B, S, K, d).

    Returns:
        Centroids (B, S, K, d); that of a cluster that is empty all the same (points that coincide) is unchanged.
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
