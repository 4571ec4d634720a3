"""Figures without matplotlib's global state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MAX_TICKS = 40


def new_figure(width: float, height: float) -> Figure:
    """Empty figure that is drawn in memory, independent of pyplot's backend.

    Args:
        width: Width in inches.
        height: Height in inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def render(figure: Figure) -> NDArray[np.uint8]:
    """Pixels of a figure, shape (H, W, 3), unsigned bytes."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if "$" in text.get_text():  # in the name of a class, say; matplotlib would read a formula
            text.set_parse_math(False)
    canvas: Any = figure.canvas
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def client_map(
    matrix: NDArray[np.float64],
    clients: list[int],
    title: str,
    across: str = "client",
    label: str = "",
    top: float = 1.0,
) -> tuple[Figure, Axes]:
    """Heat map of clients by clients.

    Args:
        matrix: Values, shape (m, m).
        clients: Ids of the m clients.
        title: Title of the figure.
        across: Label of the columns.
        label: Label of the colors.
        top: Value of the brightest color.
    """
    size = float(np.clip(2.5 + 0.2 * len(clients), 5, 12))
    figure = new_figure(size + 1.2, size)
    axes = figure.add_subplot()
    image = axes.imshow(matrix, cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
    for axis in ("x", "y"):
        thin_ticks(axes, axis, [str(client) for client in clients])
    axes.set(xlabel=across, ylabel="client", title=title)
    figure.colorbar(image, ax=axes, label=label, fraction=0.046, pad=0.02)
    return figure, axes


def colors(count: int) -> NDArray[np.float64]:
    """Distinct colors, as far as possible, shape (count, 4), red, green, blue and alpha from 0 to 1."""
    from matplotlib import colormaps

    if count <= 10:
        return np.asarray(colormaps["tab10"](np.arange(count)))
    if count <= 20:
        return np.asarray(colormaps["tab20"](np.arange(count)))
    return np.asarray(colormaps["gist_rainbow"](np.linspace(0, 1, count)))


def thin_ticks(axes: Axes, axis: str, labels: list[str]) -> None:
    """Label the positions 0, 1, ... of an axis; with more than 40 labels, evenly spread ones."""
    step = -(-len(labels) // MAX_TICKS)
    places = range(0, len(labels), step)
    rotation = 90 if axis == "x" and max(map(len, labels), default=0) > 2 else 0
    setter = axes.set_xticks if axis == "x" else axes.set_yticks
    setter(places, [labels[place] for place in places], fontsize=7, rotation=rotation)
