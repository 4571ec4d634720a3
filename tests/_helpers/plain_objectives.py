"""The self-supervised objectives in plain torch, losses by loops over samples: what the package's are held to."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def unit(row: Tensor) -> Tensor:
    return row / (row * row).sum().sqrt()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return unit(a) @ unit(b)


def share(scores: Sequence[Tensor], chosen: int) -> Tensor:
    """Minus the logarithm of one score's share of the exponentials of all."""
    return -(scores[chosen].exp() / sum(score.exp() for score in scores)).log()


def nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Every view of every sample against all other views."""
    rows, size = [*first, *second], len(first)
    losses = []
    for i, anchor in enumerate(rows):
        others = [j for j in range(2 * size) if j != i]
        scores = [cosine(anchor, rows[j]) / temperature for j in others]
        losses.append(share(scores, others.index((i + size) % (2 * size))))
    return sum(losses) / len(losses)


def mean_cosine(predicted: Tensor, fixed: Tensor) -> Tensor:
    return sum(cosine(p, f) for p, f in zip(predicted, fixed.detach(), strict=True)) / len(predicted)


class PlainObjective:
    """Copies of an encoder and of an objective's networks, which go their own way."""

    def __init__(self, encoder: nn.Module, objective: nn.Module) -> None:
        self.encoder, self.projector = copy.deepcopy(encoder), copy.deepcopy(objective.projector)
        self.predictor = copy.deepcopy(getattr(objective, "predictor", nn.Identity()))
        self.target_encoder, self.target_projector = copy.deepcopy(self.encoder), copy.deepcopy(self.projector)

    def parameters(self) -> list[nn.Parameter]:
        return [p for part in (self.encoder, self.projector, self.predictor) for p in part.parameters()]

    def named(self) -> dict[str, Tensor]:
        parts = {"encoder": self.encoder, "projector": self.projector, "predictor": self.predictor}
        return {f"{part}.{name}": t for part, net in parts.items() for name, t in net.state_dict().items()}

    def target(self) -> tuple[dict[str, Tensor], ...]:
        return self.target_encoder.state_dict(), self.target_projector.state_dict()

    def online(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Projections of both views, one after the other, first through all of the encoder."""
        encoded = self.encoder(first), self.encoder(second)
        return self.projector(encoded[0]), self.projector(encoded[1])

    def together(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Projections of both views, which pass together."""
        one, other = self.projector(self.encoder(torch.cat([first, second]))).chunk(2)
        return one, other

    def keys(self, *views: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(self.target_projector(self.target_encoder(view)) for view in views)

    def move_target(self, momentum: float) -> None:
        pairs = ((self.encoder, self.target_encoder), (self.projector, self.target_projector))
        with torch.no_grad():
            for online, target in pairs:
                for p, t in zip(online.parameters(), target.parameters(), strict=True):
                    t.copy_(momentum * t + (1 - momentum) * p)

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        raise NotImplementedError


class PlainSimCLR(PlainObjective):
    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        return nt_xent(*self.together(first, second), 0.2)


class PlainSimCLRApart(PlainObjective):
    """Each view by itself: through the encoder, then through the projector."""

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        return nt_xent(*self.online(first, second), 0.2)


class PlainBYOL(PlainObjective):
    momentum = 0.9

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        self.move_target(self.momentum)
        one, other = (self.predictor(projected) for projected in self.online(first, second))
        target, other_target = self.keys(first, second)
        return -(mean_cosine(one, other_target) + mean_cosine(other, target)) / 2


class PlainBYOLByDistances(PlainBYOL):
    """The squared distances of vectors of unit length, of both directions added."""

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        self.move_target(self.momentum)
        predicted = [self.predictor(projected) for projected in self.online(first, second)]
        pairs = zip(predicted, reversed(self.keys(first, second)), strict=True)
        gaps = [unit(p) - unit(t) for own, target in pairs for p, t in zip(own, target, strict=True)]
        return sum((gap * gap).sum() for gap in gaps) / len(first)


class PlainSimSiam(PlainObjective):
    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        one, other = self.online(first, second)
        predicted, other_predicted = self.predictor(one), self.predictor(other)
        return -(mean_cosine(predicted, other) + mean_cosine(other_predicted, one)) / 2


class PlainMoCo(PlainObjective):
    """The bank is a list: the newest batch takes the places of the oldest keys, and what passes its end is lost."""

    momentum = 0.9

    def start(self, bank: Tensor) -> None:
        self.bank, self.place = list(bank.clone()), 0

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        self.move_target(self.momentum)
        queries, keys = self.online(first, second)[0], self.keys(second)[0]
        losses = []
        for query, key in zip(queries, keys, strict=True):
            scores = [cosine(query, key) / 0.2, *(unit(query) @ old / 0.2 for old in self.bank)]
            losses.append(share(scores, 0))
        for key in keys:
            if self.place < len(self.bank):
                self.bank[self.place] = unit(key)
                self.place += 1
        self.place = 0 if self.place >= len(self.bank) else self.place
        return sum(losses) / len(losses)


class PlainSwAV(PlainObjective):
    def start(self, prototypes: Tensor) -> None:
        self.prototypes = nn.Parameter(prototypes.detach().clone())

    def parameters(self) -> list[nn.Parameter]:
        return [*super().parameters(), self.prototypes]

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        scores = [
            [[cosine(row, prototype) for prototype in self.prototypes] for row in view]
            for view in self.together(first, second)
        ]
        total = 0
        for mine, theirs in ((0, 1), (1, 0)):
            codes = sinkhorn([[math.exp(s.item() / 0.05) for s in row] for row in scores[mine]])
            for row, code in zip(scores[theirs], codes, strict=True):
                total = total + sum(q * share([s / 0.1 for s in row], k) for k, q in enumerate(code))
        return total / (2 * len(first))


def sinkhorn(matrix: list[list[float]], iterations: int = 3) -> list[list[float]]:
    """Rows are samples, columns prototypes: all prototypes alike, then all samples alike, in turn."""
    for _ in range(iterations):
        sums = [sum(row[k] for row in matrix) for k in range(len(matrix[0]))]
        matrix = [[value / total for value, total in zip(row, sums, strict=True)] for row in matrix]
        matrix = [[value / sum(row) for value in row] for row in matrix]
    return matrix


class PlainSMoG(PlainObjective):
    momentum, beta = 0.9, 0.8

    def start(self, groups: Tensor) -> None:
        self.groups = groups.clone()

    def nearest(self, row: Tensor) -> int:
        return max(range(len(self.groups)), key=lambda k: float(cosine(row, self.groups[k])))

    def loss(self, first: Tensor, second: Tensor) -> Tensor:
        self.move_target(self.momentum)
        projected, _ = self.online(first, second)
        predicted, assigned = self.predictor(projected), [self.nearest(key) for key in self.keys(second)[0]]
        members = [self.nearest(row) for row in projected.detach()]
        groups = []
        for k, group in enumerate(self.groups):
            own = [row for row, member in zip(projected, members, strict=True) if member == k]
            groups.append(self.beta * group + (1 - self.beta) * sum(own) / len(own) if own else group)
        self.groups = torch.stack(groups).detach()
        losses = [
            share([cosine(row, group) / 0.1 for group in groups], k) for row, k in zip(predicted, assigned, strict=True)
        ]
        return sum(losses) / len(losses)


def descend(parameters: Sequence[nn.Parameter], loss: Tensor, lr: float) -> None:
    """A step of plain gradient descent."""
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(lr * gradient)
