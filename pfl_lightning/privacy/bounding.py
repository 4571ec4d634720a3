"""Contributions of bounded norm, and the update that stands for their mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.client import FederatedClient
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional import ClassStatistics, covariance_factors
from pfl_lightning.functional.gaussians import covariances_by_class
from pfl_lightning.functional.numerics import at_least_single, in_double
from pfl_lightning.functional.tensor_lists import float64_device
from pfl_lightning.messages import Broadcast, ClientUpdate, FieldSchema
from pfl_lightning.server import Aggregator

PRESENCE = "presence"
"""Name of the part that says which classes a client has."""

_BOUNDED = ("class counts", "label presence", "class means", "class covariances")
_ROOT = math.sqrt(2)

Parts = Mapping[str, Tensor]
"""What a client contributes, or the sum over clients, by name: ``weights.NAME``, ``presence`` or a field."""


@dataclass(frozen=True)
class Layout:
    """What the updates of a method hold.

    Attributes:
        weights: Names of the weights that train.
        classes: Field of the classes that a client has, (K,); ``None`` where rows are those of all classes.
        counts: Field of their numbers of samples; ``None`` where there are no classes.
        rows: Fields with a vector for each class.
        covariances: Field with a covariance for each class, as matrices or as factors; ``None`` for none.
        ranks: Field with the rows of each class's factor; ``None`` for none.
        num_classes: Number of classes, C.
        width: Width of the features, d.
    """

    weights: tuple[str, ...]
    classes: str | None
    counts: str | None
    rows: tuple[str, ...]
    covariances: str | None
    ranks: str | None
    num_classes: int
    width: int

    @property
    def by_class(self) -> bool:
        """Whether there is content by class."""
        return self.classes is not None or self.counts is not None

    def bounds(self, clip_norm: float, class_norm: float) -> dict[str, float]:
        """Sensitivity of each kind of content: how far one client can move the sum.

        A client may have every class, so that of rows of norm B it moves the sum by B times the root of C.
        """
        root = math.sqrt(self.num_classes)
        found = {"weights": clip_norm} if self.weights else {}
        found |= {PRESENCE: root} if self.by_class else {}
        found |= dict.fromkeys(self.rows, class_norm * root)
        return found | ({self.covariances: class_norm**2 * root} if self.covariances is not None else {})


def layout_of(server: Aggregator, client: FederatedClient) -> Layout:
    """What updates to a server hold.

    Raises:
        ConfigurationError: Names the field that cannot be bounded, and why.
    """
    held: dict[str, str] = {}  # by what they tell
    rows = []
    for declared in fields(type(server).update_class):
        schema: FieldSchema | None = declared.metadata.get("schema")
        if schema is None or (schema.when is not None and not getattr(server, schema.when)):
            continue
        name, tells = declared.name, schema.tells
        place = "ranks" if tells == "class counts" and schema.total is None else tells
        if name != "weights" and (tells not in _BOUNDED or (place in held and tells != "class means")):
            raise _refused(
                server,
                client,
                f"its clients send {type(server).update_class.__name__}.{name}, which tells "
                f"{'something undeclared' if tells is None else f'the {tells}'} and has no known bound",
            )
        held[str(place)] = name
        rows += [name] if tells == "class means" else []
    if (rows or "class covariances" in held) and not held.keys() & {"class counts", "label presence"}:
        raise _refused(server, client, f"{rows} are sent without the classes that a client has")
    if not server.takes_mean():
        raise _refused(server, client, "its server does more with updates than average them, field by field")
    weights = _trained(server, client)
    if not weights and len(held) == 1:
        raise _refused(server, client, "its clients send nothing, and need no noise")
    sizes = server.sizes
    return Layout(
        *(weights, held.get("label presence"), held.get("class counts"), tuple(rows)),
        *(held.get("class covariances"), held.get("ranks"), sizes["C"], sizes.get("d", 0)),
    )


def _refused(server: Aggregator, client: FederatedClient, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(client).__name__} does not support privacy: {reason}. Methods that average shared weights do, such "
        "as FedAvg, FedPer, FedRep and Ditto, and so do FedProto, DCPFL and FedPAC(combination=False) (docs/privacy.md)"
    )


def _trained(server: Aggregator, client: FederatedClient) -> tuple[str, ...]:
    """Names of the weights in an update that train; frozen ones and counters stay what the server has sent."""
    parameters = dict(client.named_parameters(remove_duplicate=False))
    for name, like in server.expected_weights.items():
        if name not in parameters and isinstance(like, Tensor) and (like.is_floating_point() or like.is_complex()):
            raise _refused(
                server,
                client,
                f"weights[{name!r}] is a running statistic, which noise could turn negative; use layers without one, "
                "such as GroupNorm, or a method that leaves it on the client, such as FedBN",
            )
    return tuple(name for name in server.expected_weights if name in parameters and parameters[name].requires_grad)


# ---------------------------------------------------------------------- contributions


@torch.no_grad()
def contribution(
    layout: Layout, update: ClientUpdate, sent: Broadcast, clip_norm: float, class_norm: float
) -> tuple[dict[str, Tensor], bool]:
    """What a client adds to the sums, in single precision at least; class statistics are on the CPU, as in servers.

    Args:
        layout: What the update holds.
        update: The update, which the server has checked.
        sent: The broadcast that it answers.
        clip_norm: Bound on the norm of the change of all weights together.
        class_norm: Bound on the norm of each class mean.

    Returns:
        The parts, and whether the change of the weights was within its bound.
    """
    before, after = sent.weights, update.weights
    changes = {name: at_least_single(after[name]) - at_least_single(before[name]) for name in layout.weights}
    norms = [torch.linalg.vector_norm(change) for change in changes.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0
    scale = min(1.0, clip_norm / norm) if norm > 0 else 1.0
    parts = {f"weights.{name}": change.mul_(scale) for name, change in changes.items()}
    if not layout.by_class:
        return parts, norm <= clip_norm
    whole, update = layout.classes is None, replace(update, weights={}).with_tensors(torch.Tensor.cpu)
    classes = getattr(update, str(layout.counts)).nonzero().flatten() if whole else getattr(update, str(layout.classes))
    parts[PRESENCE] = classes.new_zeros(layout.num_classes, dtype=torch.float32).index_fill_(0, classes, 1)
    for name in layout.rows:
        rows = at_least_single(getattr(update, name))
        parts[name] = _spread(clipped(rows[classes] if whole else rows, class_norm), classes, layout)
    if layout.covariances is not None:
        triangles = _triangles(_covariances(layout, update))
        parts[layout.covariances] = _spread(clipped(triangles, class_norm**2), classes, layout)
    return parts, norm <= clip_norm


def clipped(rows: Tensor, bound: float) -> Tensor:
    """Rows (K, n), each with a norm of at most the bound."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    shorter: Tensor = rows * (bound / norms.clamp(min=bound))
    return shorter


def _spread(rows: Tensor, classes: Tensor, layout: Layout) -> Tensor:
    return rows.new_zeros(layout.num_classes, rows.shape[1]).index_copy_(0, classes, rows)


def _covariances(layout: Layout, update: ClientUpdate) -> Tensor:
    """Covariances of the client's classes, (K, d, d)."""
    given = at_least_single(getattr(update, str(layout.covariances)))
    if layout.ranks is None:
        return given
    found = covariances_by_class(given, getattr(update, layout.ranks), layout.width)
    zero = torch.zeros(layout.width, layout.width, dtype=torch.float64, device=float64_device(given.device))
    return torch.stack([found.get(place, zero) for place in range(len(getattr(update, layout.ranks)))]).to(given)


def _triangles(matrices: Tensor) -> Tensor:
    """Symmetric matrices (K, d, d) as vectors of the same norms, (K, d (d + 1) / 2)."""
    first, second = torch.triu_indices(*matrices.shape[-2:], device=matrices.device)
    return matrices[:, first, second] * torch.where(first == second, 1.0, _ROOT)


def _matrices(triangles: Tensor, width: int) -> Tensor:
    """The nearest covariances to such vectors: symmetric, without negative eigenvalues, (K, d, d) float64."""
    first, second = torch.triu_indices(width, width, device=triangles.device)
    found = triangles.new_zeros(len(triangles), width, width, dtype=torch.float64)
    found[:, first, second] = triangles.double() / torch.where(first == second, 1.0, _ROOT)
    values, vectors = torch.linalg.eigh(found, UPLO="U")
    nearest: Tensor = (vectors * values.clamp(min=0).unsqueeze(1)) @ vectors.mT
    return (nearest + nearest.mT) / 2


# ---------------------------------------------------------------------- the mean


@torch.no_grad()
def mean_update(
    layout: Layout, server: Aggregator, sent: Broadcast, sums: Parts, expected: float, least: float, class_norm: float
) -> ClientUpdate | None:
    """The update that stands for the mean of a cohort.

    All of it comes from sums with noise and from what the server has sent. A class counts where the number of its
    clients, which has noise, is large enough; means are sums over that number.

    Args:
        layout: What it holds.
        server: The server that will receive it.
        sent: What the server has sent.
        sums: Sums over the cohort, with noise.
        expected: Expected number of clients.
        least: Number of clients from which on a class counts.
        class_norm: Bound on the norm of each class mean.

    Returns:
        The update; ``None`` where it would hold nothing.
    """
    weights = {name: sent.weights[name] for name in server.expected_weights}
    for name in layout.weights:
        weights[name] = (in_double(weights[name]) + sums[f"weights.{name}"] / expected).to(weights[name])
    given: dict[str, Any] = {"client": sent.client, "round": sent.round, "weights": weights, "num_samples": 1}
    if layout.by_class:
        present = sums[PRESENCE]
        seen = (present >= least).nonzero().flatten()
        if layout.classes is not None and not len(seen):
            return None
        # A covariance of d features needs d + 1 samples to have all directions; the shares of classes are the same.
        each = present[seen].round().long().clamp(min=1) * (1 if layout.covariances is None else layout.width + 1)
        given |= {"num_samples": max(1, int(each.sum())), **_of_classes(layout, sums, seen, each, class_norm)}
    return type(server).update_class(**given)


def _of_classes(layout: Layout, sums: Parts, seen: Tensor, each: Tensor, class_norm: float) -> dict[str, Any]:
    """Fields of the classes that count."""
    among, whole = sums[PRESENCE][seen].unsqueeze(1), layout.classes is None
    counts = each.new_zeros(layout.num_classes).index_copy_(0, seen, each)
    means = {name: clipped(sums[name][seen] / among, class_norm).float() for name in layout.rows}
    found: dict[str, Any] = {name: _spread(rows, seen, layout) if whole else rows for name, rows in means.items()}
    if layout.counts is not None:
        found[layout.counts] = counts if whole else each
    if layout.classes is not None:
        found[layout.classes] = seen
    if layout.covariances is not None:
        matrices = _matrices(clipped(sums[layout.covariances][seen] / among, class_norm**2), layout.width)
        if layout.ranks is None:
            return found | {layout.covariances: matrices.float()}
        covariances = dict(zip(seen.tolist(), matrices, strict=True))
        zeros = torch.zeros(layout.num_classes, layout.width)
        factors, ranks = covariance_factors(ClassStatistics.from_moments(counts, zeros, covariances))
        found |= {layout.covariances: factors.float(), layout.ranks: ranks[seen]}
    return found
