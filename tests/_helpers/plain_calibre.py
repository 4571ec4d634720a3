"""Calibre (SimCLR) and pFL-SimCLR in plain torch: clusters, losses, SGD and averaging written out."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from _helpers.plain import mean_of
from _helpers.plain_objectives import nt_xent, share, unit
from _helpers.toy import CLASSES, FEATURES, SEED, Toy
from _helpers.views import flat_encoder, pairs_of_views
from pfl_lightning.seeding import derive_seed

STARTS, ITERATIONS = 4, 10  # more change nothing on the few points of a client


class Networks(nn.Module):
    """Encoder, head and a projector of two layers without normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = flat_encoder(())
        self.head = nn.Linear(FEATURES, CLASSES)
        self.projector = nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, 5))


@dataclass
class PlainCalibre:
    """Clients and server."""

    data: Toy
    epochs: int
    lr: float
    alpha_n: float = 0.3
    alpha_p: float = 0.3
    clusters: int = 3
    by_divergence: bool = True
    of_unit_length: bool = False
    server: Networks = field(init=False)
    head: dict[str, Tensor] = field(init=False)
    divergences: dict[int, float] = field(default_factory=dict)
    sizes_of_batches: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        torch.manual_seed(derive_seed(SEED, "initial weights"))
        self.server = Networks().double()
        self.head = {name: tensor.clone() for name, tensor in self.server.head.state_dict().items()}  # never trained

    def shared(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in self.server.named_parameters() if not n.startswith("head.")}

    def play(self, round: int, cohort: list[int]) -> None:
        states, weights = [], []
        for client in cohort:
            net, draws = self.fit(client, round)
            states.append({n: p.detach() for n, p in net.named_parameters()})
            self.divergences[client] = self.divergence(net, client, draws)
            weights.append(1 / self.divergences[client] if self.by_divergence else len(self.data.tensors(client)[0]))
        self.server.load_state_dict(mean_of(states, weights))

    def fit(self, client: int, round: int) -> tuple[Networks, Tensor]:
        """The trained networks, and the draws for the k-means on all encodings."""
        net = copy.deepcopy(self.server)
        torch.manual_seed(derive_seed(SEED, "fit/model", round, client))
        regularized = self.alpha_n > 0 or self.alpha_p > 0
        noise = torch.rand(STARTS, self.clusters, 3) if regularized else torch.zeros(0)  # 2 + floor(log 3) candidates
        draws = torch.rand(10, self.clusters, 3, generator=torch.Generator().manual_seed(int(torch.randint(2**62, ()))))
        trained = [*net.encoder.parameters(), *net.projector.parameters()]
        velocity = [torch.zeros_like(p) for p in trained]
        for first, second in pairs_of_views(self.data, client, round, self.epochs):
            self.sizes_of_batches.add(len(first))
            gradients = torch.autograd.grad(self.loss(net, first, second, noise.double()), trained)
            with torch.no_grad():
                for p, g, v in zip(trained, gradients, velocity, strict=True):
                    v.mul_(0.9).add_(g + 1e-4 * p)
                    p.sub_(self.lr * v)
        return net, draws.double()

    def loss(self, net: Networks, first: Tensor, second: Tensor, noise: Tensor) -> Tensor:
        """Algorithm 1."""
        encoded = net.encoder(first), net.encoder(second)
        projected = net.projector(encoded[0]), net.projector(encoded[1])
        value = nt_xent(*projected, 0.2)
        if not (self.alpha_n or self.alpha_p):
            return value
        count = min(self.clusters, len(first))
        labels = clusters_of(torch.cat(encoded).detach(), noise[:, :count, : 3 if count == 3 else 2])
        of_e, of_o = labels[: len(first)], labels[len(first) :]
        both = sorted(set(of_e) & set(of_o))
        if self.alpha_n and both:
            value = value + self.alpha_n * meta(*encoded, of_e, of_o)
        if self.alpha_p and both:
            pairs = [[mean(view, own, k) for k in both] for view, own in zip(projected, (of_e, of_o), strict=True)]
            value = value + self.alpha_p * nt_xent(*pairs, 0.5)
        return value

    def divergence(self, net: Networks, client: int, draws: Tensor) -> float:
        """Mean over clusters of the mean distance to the centroid."""
        with torch.no_grad():
            encodings = net.encoder(self.data.tensors(client)[0].double())
        if self.of_unit_length:
            encodings = torch.stack([row / row.square().sum().sqrt() for row in encodings])
        labels = clusters_of(encodings, draws)
        spreads = []
        for k in sorted(set(labels)):
            centroid = mean(encodings, labels, k)
            own = [row for row, label in zip(encodings, labels, strict=True) if label == k]
            spreads.append(sum((row - centroid).square().sum().sqrt() for row in own) / len(own))
        return float(sum(spreads) / len(spreads))


def square_distances(points: Tensor, centroids: Tensor) -> Tensor:
    return (points[:, None] - centroids).square().sum(-1)


def clusters_of(points: Tensor, noise: Tensor) -> list[int]:
    """K-means: greedy k-means++ with given draws (S, K, L), Lloyd's iterations, the best of the S starts."""
    found = []
    for draws in noise:
        centroids = points[int(draws[0, 0] * len(points))][None]
        for shares in draws[1:]:
            cumulated = square_distances(points, centroids).amin(1).cumsum(0)
            chosen = [min(int((cumulated <= s * cumulated[-1]).sum()), len(points) - 1) for s in shares]
            trials = [torch.cat([centroids, points[i][None]]) for i in chosen]
            centroids = min(trials, key=lambda trial: float(square_distances(points, trial).amin(1).sum()))
        for _ in range(ITERATIONS):
            distances, labels = square_distances(points, centroids).min(1)
            farthest = distances.argsort(descending=True).tolist()
            for k in sorted(set(range(len(centroids))) - set(labels.tolist())):
                labels[farthest.pop(0)] = k  # an empty cluster takes the farthest point
            centroids = torch.stack([points[labels == k].mean(0) for k in range(len(centroids))])
        distances, labels = square_distances(points, centroids).min(1)
        found.append((float(distances.sum()), labels.tolist()))
    return min(found, key=lambda result: result[0])[1]


def mean(rows: Tensor, labels: list[int], cluster: int) -> Tensor:
    own = [row for row, label in zip(rows, labels, strict=True) if label == cluster]
    return sum(own) / len(own)


def meta(support: Tensor, queries: Tensor, support_labels: list[int], query_labels: list[int]) -> Tensor:
    """L_n: queries that have a prototype are classified by their distances to all prototypes."""
    known = sorted(set(support_labels))
    prototypes = [unit(mean(support, support_labels, k)) for k in known]
    losses = []
    for query, label in zip(queries, query_labels, strict=True):
        if label in known:
            scores = [-(unit(query) - prototype).square().sum() for prototype in prototypes]
            losses.append(share(scores, known.index(label)))
    return sum(losses) / len(losses)
