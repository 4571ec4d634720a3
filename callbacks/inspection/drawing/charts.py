"""Charts of TensorBoard's Custom Scalars tab."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LOSSES", "Chart", "Layout", "layout"]

Layout = dict[str, dict[str, list[str | list[str]]]]
"""Categories of charts by title: the kind of a chart and its tags."""


@dataclass(frozen=True)
class Chart:
    """A chart of scalars.

    Attributes:
        category: Under which heading it stands.
        title: What stands above it.
        tags: The scalars: regular expressions; for a chart with a band the tags of value, lower and upper end.
        band: Whether it is a line in a band.
    """

    category: str
    title: str
    tags: tuple[str, ...]
    band: bool = False


LOSSES = (
    Chart("loss", "loss by component, mean over the cohort", ("train/(?!clients_left_out).*",)),
    Chart("loss", "loss on the clients' own parts", (".*loss/mean",)),
)
"""What :class:`~pfl_lightning.callbacks.FederatedLoop` and the federation log in any case."""


def layout(charts: Sequence[Chart]) -> Layout:
    """The charts as ``SummaryWriter.add_custom_scalars`` takes them."""
    categories: Layout = {}
    for chart in charts:
        kind = "Margin" if chart.band else "Multiline"
        categories.setdefault(chart.category, {})[chart.title] = [kind, list(chart.tags)]
    return categories
