"""Charts of TensorBoard's Custom Scalars tab."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LOSSES", "Chart", "Layout", "layout"]

Layout = dict[str, dict[str, list[str | list[str]]]]
"""Charts by category and title: the kind of a chart and its tags."""


@dataclass(frozen=True)
class Chart:
    """Chart of scalars.

    Attributes:
        category: Heading under which the chart is shown.
        title: Title of the chart.
        tags: Regular expressions of the scalars; for a chart with a band the tags of value, lower and upper end.
        band: True for a line with a band around it.
    """

    category: str
    title: str
    tags: tuple[str, ...]
    band: bool = False


LOSSES = (
    Chart("loss", "loss by component, mean over the cohort", ("train/(?!clients_left_out).*",)),
    Chart("loss", "loss on the clients' own splits", (".*loss/mean",)),
)
"""Charts of the losses that :class:`~pfl_lightning.callbacks.FederatedLoop` and the federation always log."""


def layout(charts: Sequence[Chart]) -> Layout:
    """Layout of charts for ``SummaryWriter.add_custom_scalars``.

    Example:
        >>> layout([Chart("loss", "training loss", ("train/.*",))])
        {'loss': {'training loss': ['Multiline', ['train/.*']]}}
    """
    categories: Layout = {}
    for chart in charts:
        kind = "Margin" if chart.band else "Multiline"
        categories.setdefault(chart.category, {})[chart.title] = [kind, list(chart.tags)]
    return categories
