"""K-means written out as loops, and encodings to cluster."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


class TieError(Exception):
    """Two candidates are equally good, so that rounding decides between them."""


def draw(points: int, features: int, seed: int = 0) -> Tensor:
    return torch.randn(points, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_noise(starts: int, clusters: int, seed: int = 0) -> Tensor:
    candidates = 2 + len([power for power in range(1, 9) if 2.718281828459045**power <= clusters])
    shape = (starts, clusters, candidates)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)


@cache
def digit_encodings() -> Tensor:
    """Features (1797, 128) that a random convolutional network gives the bundled digits."""
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 128, 3, stride=2), nn.ReLU()
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())(images)


def square_distance(a: list[float], b: list[float]) -> float:
    return sum((u - v) ** 2 for u, v in zip(a, b, strict=True))


def mean_point(points: list[list[float]]) -> list[float]:
    return [sum(column) / len(points) for column in zip(*points, strict=True)]


def slow_assignment(points: list[list[float]], centroids: list[list[float]]) -> tuple[list[int], list[float]]:
    """The nearest centroid of each point, and the squared distance to it."""
    rows = [[square_distance(point, centroid) for centroid in centroids] for point in points]
    return [row.index(min(row)) for row in rows], [min(row) for row in rows]


def slow_start(points: list[list[float]], noise: list[list[float]]) -> list[list[float]]:
    """Greedy k-means++ with given draws (K, L)."""
    centroids = [points[int(noise[0][0] * len(points))]]
    for draws in noise[1:]:
        closest = slow_assignment(points, centroids)[1]
        trials = []
        for share in draws:
            target, total, index = share * sum(closest), 0.0, 0
            for index, distance in enumerate(closest):  # noqa: B007
                total += distance
                if total > target:
                    break
            potential = sum(slow_assignment(points, [*centroids, points[index]])[1])
            trials.append((potential, points[index]))
        trials.sort(key=lambda trial: trial[0])
        if any(other != trials[0][1] and potential < trials[0][0] + 1e-9 for potential, other in trials):
            raise TieError
        centroids.append(trials[0][1])
    return centroids


def slow_improvement(points: list[list[float]], centroids: list[list[float]]) -> list[list[float]]:
    """Lloyd's iteration; empty clusters take the farthest points."""
    assignment, distances = slow_assignment(points, centroids)
    farthest = sorted(range(len(points)), key=lambda index: -distances[index])
    for cluster in range(len(centroids)):
        if cluster not in slow_assignment(points, centroids)[0]:
            assignment[farthest.pop(0)] = cluster
    members = [[p for p, own in zip(points, assignment, strict=True) if own == k] for k in range(len(centroids))]
    return [mean_point(own) if own else old for own, old in zip(members, centroids, strict=True)]


def slow_kmeans(
    points: list[list[float]], clusters: int, iterations: int, noise: list[list[list[float]]]
) -> tuple[list[list[float]], list[int], float]:
    """Centroids, assignment and inertia of the best start, with draws (S, K, L)."""
    results = []
    for draws in noise:
        centroids = slow_start(points, draws)
        assert len(centroids) == clusters
        for _ in range(iterations):
            centroids = slow_improvement(points, centroids)
        assignment, distances = slow_assignment(points, centroids)
        results.append((centroids, assignment, sum(distances)))
    best = min(results, key=lambda result: result[2])
    if any(sorted(one[0]) != sorted(best[0]) and one[2] < best[2] + 1e-9 for one in results):
        raise TieError
    return best
