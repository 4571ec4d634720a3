"""Who gets how much of whose head: FedPAC's Figures 2 and 3 (ICLR 2023)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np

from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.callbacks.inspection.drawing.charts import Chart
from pfl_lightning.callbacks.inspection.drawing.figures import client_map
from pfl_lightning.callbacks.inspection.groups import ClientGroups, group_clients
from pfl_lightning.federation import Federation
from pfl_lightning.server import AggregationWeights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CombinationWeights", "draw_mixture"]


class CombinationWeights(InspectionCallback):
    """The weights with which clients' heads are combined (FedPAC, eq. 4), as a heat map with the groups marked.

    Clients of the cohort are ordered by group: those with the same domain, rotation or labels by design, and the same
    dominant classes. Row i shows what client i gets, column j what client j gives. Every round has scalars, means over
    the cohort: ``combination/own`` (what a client gets of itself), ``combination/group`` (of its group, itself
    included; without groups it is left out) and ``combination/clients`` (how many clients a head is made of,
    1 / sum_j a_ij^2).

    For other methods there is nothing to show: methods that leave a ``aggregation_weights`` at the server are shown.

    Args:
        every_n_rounds: Rounds between two heat maps.
        dirpath: See :class:`InspectionCallback`.
    """

    _groups: ClientGroups

    def unavailable(self, trainer: L.Trainer, federation: Federation) -> str | None:
        """The method combines nothing for single clients."""
        if federation.server.has_client_weights():
            return None
        name = federation.method_name
        return f"{name}'s server makes no combination for each client (FedPAC's does, with combination=True)"

    def charts(self, federation: Federation) -> tuple[Chart, ...]:
        """Shares and numbers of clients."""
        return (
            Chart("combination", "what a client gets of itself and of its group", ("combination/(own|group)",)),
            Chart("combination", "clients in a head", ("combination/clients",)),
        )

    def before_fit(self, trainer: L.Trainer, federation: Federation) -> None:
        """Find the groups."""
        data: Any = federation.data
        self._groups = group_clients(data.class_counts(), data.class_names, data.client_groups)

    def after_round(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Log the scalars."""
        mixture = federation.server.aggregation_weights
        if mixture is None:
            return
        weights = mixture.weights.double().numpy()
        group = self._groups.group_of[list(mixture.clients)]
        values = {
            "combination/own": float(weights.diagonal().mean()),
            "combination/clients": float((1 / np.square(weights).sum(axis=1)).mean()),
        }
        if len(self._groups.names) > 1:
            values["combination/group"] = float((weights * (group[:, None] == group)).sum(axis=1).mean())
        self.recorder.scalars(values, round)

    def show(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Log the heat map."""
        mixture = federation.server.aggregation_weights
        if mixture is not None:
            self.recorder.figure("combination_weights", draw_mixture(mixture, self._groups, round), round)


def draw_mixture(mixture: AggregationWeights, groups: ClientGroups, round: int) -> Figure:
    """A heat map of the weights, clients ordered by group, with lines between the groups."""
    order = groups.order(mixture.clients)
    weights = mixture.weights.double().numpy()[np.ix_(order, order)]
    clients = [mixture.clients[place] for place in order]
    top = max(float(weights.max()), 1e-9)
    figure, axes = client_map(weights, clients, f"combination weights, round {round}", "head of client", "weight", top)
    _mark_groups(axes, groups, [int(groups.group_of[client]) for client in clients])
    return figure


def _mark_groups(axes: Any, groups: ClientGroups, group_of: list[int]) -> None:
    present = sorted(set(group_of))
    if len(present) < 2:
        return
    ends = [group_of.index(group) for group in present[1:]]
    for end in ends:
        axes.axhline(end - 0.5, color="white", linewidth=1)
        axes.axvline(end - 0.5, color="white", linewidth=1)
    bounds = [0, *ends, len(group_of)]
    middles = [(start + end - 1) / 2 for start, end in itertools.pairwise(bounds)]
    above = axes.secondary_xaxis("top")
    names = [groups.names[group] for group in present]
    above.set_xticks(middles, names, fontsize=7, rotation=0 if max(map(len, names)) <= 6 else 90)
    above.tick_params(length=0)
