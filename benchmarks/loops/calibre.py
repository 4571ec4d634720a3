"""A round of Calibre (Chen et al., ICDCS 2024) with SimCLR in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.seeding import seeded_generator

from . import Loop, Setting, State, copied, mean_of
from .self_supervised import nt_xent, simclr_projector

ALPHA, CLUSTERS, TEMPERATURE, PROTOTYPE_TEMPERATURE = 0.3, 10, 0.2, 0.5
STARTS, ITERATIONS = 4, 10
"""Of the k-means on a batch."""
ALL_STARTS, ALL_ITERATIONS, TOLERANCE = 10, 300, 1e-4
"""Of the k-means on a client's encodings, which are scikit-learn's."""


def candidates(clusters: int) -> int:
    """Candidates for each start of greedy k-means++."""
    return 2 + int(math.log(clusters))


class Calibre(Loop):
    """Encoder and projector are averaged, with weights in inverse proportion to divergence rates."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        encoder = setting.make_encoder()
        projector = simclr_projector(int(encoder.out_features))
        self.model = nn.ModuleDict({"encoder": encoder, "projector": projector}).to(setting.dtype)

    def round(self, number: int) -> None:
        """See :meth:`Loop.round`."""
        trained, rates = list[State](), list[float]()
        for client in range(len(self.setting.data)):
            self.model.load_state_dict(self.server)
            generator = seeded_generator(self.setting.seed, "fit/model", number, client)
            draws = torch.rand(STARTS, CLUSTERS, candidates(CLUSTERS), generator=generator, dtype=torch.float32)
            seed = int(torch.randint(2**62, (), generator=generator))
            self.fit(client, number, draws)
            rates.append(self.divergence(client, torch.Generator().manual_seed(seed)))
            trained.append(copied(self.model, ""))
        self.server = mean_of(trained, [1 / rate for rate in rates])

    def fit(self, client: int, round: int, draws: Tensor) -> None:
        """Train encoder and projector on two views of a client's images (Algorithm 1); nothing is augmented here."""
        model, (inputs, _) = self.model.train(), self.setting.data[client]
        optimizer = torch.optim.SGD(model.parameters(), **self.setting.sgd)
        for batch in self.setting.batches(client, round):
            views = torch.cat([inputs[batch], inputs[batch]])
            encoded = model["encoder"](views)
            projected = model["projector"](encoded)
            loss = nt_xent(*projected.chunk(2), TEMPERATURE)  # L_ssl
            count = min(CLUSTERS, len(batch))
            starts = draws[:, :count, : candidates(count)]
            assigned = kmeans(encoded.detach(), starts.to(encoded), ITERATIONS)[0].chunk(2)
            prototypes, found = zip(*map(means_of, encoded.chunk(2), assigned, [count] * 2), strict=True)
            loss = loss + ALPHA * meta(prototypes[0], found[0], encoded.chunk(2)[1], assigned[1])  # L_n
            both = found[0] & found[1]
            pairs = [means_of(p, a, count)[0][both] for p, a in zip(projected.chunk(2), assigned, strict=True)]
            loss = loss + ALPHA * nt_xent(*pairs, PROTOTYPE_TEMPERATURE)  # L_p
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def divergence(self, client: int, generator: torch.Generator) -> float:
        """Mean over clusters of the mean distance of encodings to their centroid."""
        encoder, inputs = self.model["encoder"].eval(), self.setting.data[client][0]
        encoded = torch.cat([encoder(part) for part in inputs.split(128)])
        count = min(CLUSTERS, len(encoded))
        draws = torch.rand(ALL_STARTS, count, candidates(count), generator=generator, dtype=torch.float32)
        assigned, centroids = kmeans(encoded, draws.to(encoded), ALL_ITERATIONS, TOLERANCE)
        distances = torch.linalg.vector_norm(encoded - centroids[assigned], dim=1)
        means, found = means_of(distances[:, None], assigned, count)
        return float(means[found].mean())


def means_of(rows: Tensor, assigned: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Mean row of each cluster, and which clusters have rows."""
    members = F.one_hot(assigned, clusters).to(rows).T
    counts = members.sum(dim=1)
    return members @ rows / counts.clamp(min=1)[:, None], counts > 0


def meta(prototypes: Tensor, found: Tensor, queries: Tensor, assigned: Tensor) -> Tensor:
    """Cross entropy of the queries' distances to the prototypes of the other view."""
    distances = torch.cdist(F.normalize(queries), F.normalize(prototypes)).square()
    scores = (-distances).masked_fill(~found, -torch.inf)
    known = found[assigned]
    return F.cross_entropy(scores[known], assigned[known])


@torch.no_grad()
def kmeans(points: Tensor, draws: Tensor, iterations: int, tolerance: float = 0.0) -> tuple[Tensor, Tensor]:
    """Clusters of points (N, d) and their centroids, from the best of S starts that are improved together.

    Args:
        points: The points.
        draws: Uniform draws for the starts, (S, K, L).
        iterations: Lloyd's iterations, at most.
        tolerance: A start stands still where its centroids moved by this share of the points' variance, at most.
    """
    centroids = plus_plus(points, draws)
    bound = tolerance * points.var(dim=0, correction=0).mean()
    moving = torch.ones(len(draws), dtype=torch.bool)
    for _ in range(iterations):
        before = centroids[moving]
        after = lloyd(points, before)
        centroids[moving] = after
        moving[moving.clone()] = (after - before).square().sum(dim=(1, 2)) > bound
        if not moving.any():
            break
    distances, assigned = square_distances(points, centroids).min(dim=1)
    best = distances.sum(dim=1).argmin()
    return assigned[best], centroids[best]


def square_distances(points: Tensor, centroids: Tensor) -> Tensor:
    """Squared distances (S, K, N)."""
    return torch.cdist(centroids, points).square()


def plus_plus(points: Tensor, draws: Tensor) -> Tensor:
    """Starts of greedy k-means++, (S, K, d)."""
    rows = torch.arange(len(draws))
    centroids = points[(draws[:, 0, :1] * len(points)).long()]
    nearest = square_distances(points, centroids)[:, 0]
    for draw in draws[:, 1:].unbind(dim=1):
        cumulated = nearest.cumsum(dim=1)
        index = torch.searchsorted(cumulated, draw * cumulated[:, -1:], right=True).clamp(max=len(points) - 1)
        trials = torch.minimum(nearest[:, None], square_distances(points, points[index]))
        best = trials.sum(dim=2).argmin(dim=1)
        nearest = trials[rows, best]
        centroids = torch.cat([centroids, points[index[rows, best]][:, None]], dim=1)
    return centroids


def lloyd(points: Tensor, centroids: Tensor) -> Tensor:
    """Means (S, K, d) of the points that are nearest to each centroid; an empty cluster takes the farthest point."""
    distances, assigned = square_distances(points, centroids).min(dim=1)
    members = F.one_hot(assigned, centroids.shape[1])
    for start in (members.sum(dim=1) == 0).any(dim=1).nonzero().flatten().tolist():
        empty = (members[start].sum(dim=0) == 0).nonzero().flatten()
        assigned[start, distances[start].topk(len(empty)).indices] = empty
        members[start] = F.one_hot(assigned[start], centroids.shape[1])
    members = members.to(points).mT
    counts = members.sum(dim=2, keepdim=True)
    return torch.where(counts > 0, members @ points / counts.clamp(min=1), centroids)
