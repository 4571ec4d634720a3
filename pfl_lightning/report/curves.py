"""Learning curves with bands over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pfl_lightning.report.rows import MeasuredRow, blocks, learning_curve
from pfl_lightning.runs.curves import draw_clients, read_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


AXES = {0: "round", 1: "MB up and down, all clients", 2: "simulated seconds"}
"""What curves are drawn by, by its place in a point of a learning curve."""

NAMES = {"classifier": "test accuracy", "nearest_neighbor": "nearest-neighbor test accuracy"}


def draw_curves(rows: Sequence[MeasuredRow]) -> Figure | None:
    """A line of panels for each setting and score: accuracy by rounds, by megabytes and by simulated seconds.

    Bands are one standard deviation over seeds. Scores of different kinds never share a panel.

    Args:
        rows: The rows of all settings.

    Returns:
        The figure; ``None`` where no run has accuracies.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    metric = next((run.metric for row in rows for run in row.runs), "accuracy")
    names = {score: name.replace("accuracy", metric.replace("_", " ")) for score, name in NAMES.items()}
    lines = []
    for setting, some in blocks(rows).items():
        for score in NAMES:
            drawn = [row for row in some if row.runs and row.score("test") == score and learning_curve(row.runs)]
            lines += [(setting, score, drawn)] if drawn else []
    if not lines:
        return None
    known = [place for place in AXES if any(_knows(row, place) for _, _, drawn in lines for row in drawn)]
    figure = Figure(figsize=(6 * len(known), 3.8 * len(lines)), layout="constrained")
    axes = figure.subplots(len(lines), len(known), squeeze=False)
    labels = dict.fromkeys(row.label for _, _, drawn in lines for row in drawn)
    colors = {label: f"C{number}" for number, label in enumerate(labels)}  # a method has one color everywhere
    for (setting, score, drawn), panels in zip(lines, axes, strict=True):
        for panel, place in zip(panels, known, strict=True):
            _draw_curves(panel, [row for row in drawn if _knows(row, place)], colors, place)
            title = ": ".join(filter(None, [_plain(setting), f"{names[score]} by {AXES[place].split(',')[0]}"]))
            panel.set(xlabel=AXES[place], ylabel="mean over clients, %", title=title)
        panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))  # rounds
    return figure


def draw_single_clients(rows: Sequence[MeasuredRow]) -> Figure | None:
    """A panel for each row: the curves of all clients of its first seed; ``None`` where no run has them.

    Args:
        rows: The rows of all settings.
    """
    from matplotlib.figure import Figure

    drawn = [(row, read_curves(row.runs[0].path)) for row in rows if row.runs]
    drawn = [(row, curves) for row, curves in drawn if any(part == "test" for _, _, part, _, _ in curves)]
    if not drawn:
        return None
    lines = math.ceil(len(drawn) / 3)
    figure = Figure(figsize=(4.5 * min(3, len(drawn)), 3.2 * lines), layout="constrained")
    panels = figure.subplots(lines, min(3, len(drawn)), squeeze=False, sharey=True)
    for panel, (row, curves) in zip(panels.flat, drawn, strict=False):
        draw_clients(panel, curves, "test", row.runs[0].metric)
        panel.set(title=_plain(row.name))
    for panel in panels.flat[len(drawn) :]:
        panel.set_axis_off()
    return figure


def _knows(row: MeasuredRow, place: int) -> bool:
    return not any(math.isnan(point[place]) for point in learning_curve(row.runs))


def _draw_curves(panel: Axes, rows: Sequence[MeasuredRow], colors: Mapping[str, str], place: int) -> None:
    for row in rows:
        *axes, means, spreads = zip(*learning_curve(row.runs), strict=True)
        where, middle = axes[place], [100 * mean for mean in means]
        color, marker = colors[row.label], "o" if len(where) == 1 else None
        panel.plot(where, middle, label=_plain(row.label), color=color, marker=marker)
        if len(row.runs) > 1:
            low, high = ([100 * (m + sign * s) for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
            panel.fill_between(where, low, high, color=color, alpha=0.2, linewidth=0)
    if rows:
        panel.legend(loc="lower right", fontsize="small")
    panel.grid(alpha=0.3)


def _plain(label: str) -> str:
    """Without formulas, and seen in a legend."""
    return label.replace("$", r"\$").lstrip("_")
