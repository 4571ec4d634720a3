"""Aggregation weights between clients' heads (FedPAC, ICLR 2023, Figures 2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import lightning as L
import numpy as np
from numpy.typing import NDArray

from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.callbacks.inspection.figures import client_map
from pfl_lightning.federation import Federation
from pfl_lightning.server import AggregationWeights

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SHARE_OF_LARGEST = 0.5  # a client's own classes are those with at least half the samples of its largest one


class CombinationWeights(InspectionCallback):
    """Weights with which clients' heads are combined (FedPAC, eq. 4), as a heat map with the groups marked.

    The clients of the round are ordered by group: the same domain, rotation or labels by design, and the same dominant
    classes. Entry (i, j) is the weight of client j's head in client i's. Every round logs means over its clients:

    - ``combination/own``: weight of a client's own head.
    - ``combination/group``: weight of the heads of its group, its own included; not logged without groups.
    - ``combination/clients``: effective number of clients in a head, 1 / sum_j a_ij^2.

    Other methods have nothing to show, unless their server sets ``aggregation_weights``.

    Args:
        every_n_rounds: Rounds between two heat maps.
        dirpath: See :class:`InspectionCallback`.
    """

    charts: ClassVar = {
        "combination": {
            "weight of a client's own head and of its group": ["Multiline", ["combination/(own|group)"]],
            "clients in a head": ["Multiline", ["combination/clients"]],
        }
    }
    _groups: ClientGroups

    def unavailable(self, trainer: L.Trainer, federation: Federation) -> str | None:
        """Reason if the method has no weights for each client; else None."""
        if federation.server.has_client_weights():
            return None
        name = federation.method_name
        return f"{name}'s server has no aggregation weights for each client (FedPAC's has, with combination=True)"

    def before_fit(self, trainer: L.Trainer, federation: Federation) -> None:
        """Find the groups."""
        data: Any = federation.data
        self._groups = group_clients(data.class_counts(), data.class_names, data.client_groups)

    def after_round(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Log the scalars."""
        weights = federation.server.aggregation_weights
        if weights is None:
            return
        matrix = weights.weights.double().numpy()
        group = self._groups.group_of[list(weights.clients)]
        values = {
            "combination/own": float(matrix.diagonal().mean()),
            "combination/clients": float((1 / np.square(matrix).sum(axis=1)).mean()),
        }
        if len(self._groups.names) > 1:
            values["combination/group"] = float((matrix * (group[:, None] == group)).sum(axis=1).mean())
        self.recorder.scalars(values, round)

    def show(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Log the heat map."""
        weights = federation.server.aggregation_weights
        if weights is not None:
            self.recorder.figure("combination_weights", draw_weights(weights, self._groups, round), round)


def draw_weights(weights: AggregationWeights, groups: ClientGroups, round: int) -> Figure:
    """Heat map of the weights, with clients ordered by group and lines between the groups."""
    order = groups.order(weights.clients)
    matrix = weights.weights.double().numpy()[np.ix_(order, order)]
    clients = [weights.clients[place] for place in order]
    top = max(float(matrix.max()), 1e-9)
    figure, axes = client_map(matrix, clients, f"combination weights, round {round + 1}", "client", "weight", top)
    _mark_groups(axes, groups, [int(groups.group_of[client]) for client in clients])
    return figure


def _mark_groups(axes: Any, groups: ClientGroups, group_of: list[int]) -> None:
    present, starts, sizes = np.unique(group_of, return_index=True, return_counts=True)  # clients come by group
    if len(present) < 2:
        return
    for start in starts[1:]:
        axes.axhline(start - 0.5, color="white", linewidth=1)
        axes.axvline(start - 0.5, color="white", linewidth=1)
    above = axes.secondary_xaxis("top")
    names = [groups.names[group] for group in present]
    above.set_xticks(starts + (sizes - 1) / 2, names, fontsize=7, rotation=0 if max(map(len, names)) <= 6 else 90)
    above.tick_params(length=0)


@dataclass(frozen=True)
class ClientGroups:
    """Clients that have the same classes and the same design (domain, rotation, labels).

    Attributes:
        names: A name for each group, in their order; a single "" if there is only one group.
        group_of: Group of each client, shape (m,).
    """

    names: tuple[str, ...]
    group_of: NDArray[np.int64]

    def order(self, clients: Sequence[int]) -> list[int]:
        """Positions of ``clients`` sorted by group, and by id within a group."""
        return sorted(range(len(clients)), key=lambda place: (self.group_of[clients[place]], clients[place]))


def group_clients(
    counts: NDArray[np.int64], class_names: Sequence[str], design: Sequence[str] | None = None
) -> ClientGroups:
    """Groups of clients with the same design and the same dominant classes.

    Dominant classes are those with at least half the samples of the client's largest class. If that makes more groups
    than half the clients, groups are by design alone; if the design does so too, there is a single group.

    Args:
        counts: Number of training samples of each class at each client, shape (m, C).
        class_names: A name for each class.
        design: Label of each client by design, such as its domain; ``None`` for none.

    Example:
        >>> counts = np.array([[9, 1], [8, 0], [1, 9], [0, 7]])
        >>> groups = group_clients(counts, class_names=["cat", "dog"])
        >>> groups.names, groups.group_of.tolist()
        (('cat', 'dog'), [0, 0, 1, 1])
    """
    own = [tuple(np.flatnonzero(row >= SHARE_OF_LARGEST * max(row.max(), 1)).tolist()) for row in counts]
    labels = list(design) if design is not None else [""] * len(counts)
    for keys in ([(label, classes) for label, classes in zip(labels, own, strict=True)], [(la, ()) for la in labels]):
        distinct = list(dict.fromkeys(keys))  # in the order of their first clients
        if 1 < len(distinct) <= len(counts) / 2:
            every = all(len(classes) == counts.shape[1] for _, classes in distinct)
            names = [_name(label, () if every else classes, class_names) for label, classes in distinct]
            return ClientGroups(tuple(names), np.array([distinct.index(key) for key in keys], dtype=np.int64))
    return ClientGroups(("",), np.zeros(len(counts), dtype=np.int64))


def _name(label: str, classes: Sequence[int], class_names: Sequence[str]) -> str:
    named = [str(class_names[c]) for c in classes[:4]] + (["..."] if len(classes) > 4 else [])
    return ": ".join(filter(None, (label, " ".join(named))))
