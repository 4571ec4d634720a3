"""Figures and tables of partitions: the number of samples of each class at each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.state.files import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 120
"""Clients that a heat map shows, and names on an axis of it."""


def plot_partition(
    counts: Ints, class_names: Sequence[str], path: str | Path, groups: Sequence[str] | None = None
) -> None:
    """Save a heat map of clients by classes, with a bar for each client's size.

    Of more than 120 clients, 120 evenly spread ones are shown.

    Args:
        counts: Samples of each class at each client, shape (m, C).
        class_names: A name for each class.
        path: The PNG file to write; missing folders are created.
        groups: A label of each client, such as its domain; None for no labels.

    Raises:
        ValueError: If the shapes do not match.
    """
    figure = partition_figure(counts, class_names, groups)
    with replace_file(Path(path)) as temporary:
        figure.savefig(temporary, dpi=130, format="png")


def partition_figure(counts: Ints, class_names: Sequence[str], groups: Sequence[str] | None = None) -> Figure:
    """Heat map of clients by classes as a matplotlib figure, see :func:`plot_partition`.

    Args:
        counts: Samples of each class at each client, shape (m, C).
        class_names: A name for each class.
        groups: A label of each client, such as its domain; None for no labels.

    Raises:
        ValueError: If the shapes do not match.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    check_counts(counts, class_names, groups)
    clients = np.unique(np.linspace(0, len(counts) - 1, min(len(counts), _MOST)).round().astype(np.int64))
    shown, names = counts[clients], [str(name).replace("$", r"\$") for name in class_names]  # which begins a formula
    rows, columns = shown.shape
    width, height = float(np.clip(2.6 + 0.3 * columns, 5.5, 18)), float(np.clip(1.6 + 0.26 * rows, 3.5, 18))
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1, 2, width_ratios=[max(columns, 6), max(3, columns // 8)])
    axes = figure.add_subplot(grid[0])
    # The square root keeps small counts apart from none where a few clients hold almost everything.
    scale = PowerNorm(0.5, vmin=0, vmax=max(int(shown.max()), 1))
    held = np.where(shown > 0, shown, np.nan)
    image = axes.imshow(held, aspect="auto", cmap="YlGnBu", norm=scale, interpolation="nearest")
    axes.set_facecolor("white")
    small = 8 if max(rows, columns) <= 40 else 6
    step = -(-columns // _MOST)
    upright = 0 if max(map(len, names)) <= 2 else 90
    axes.set_xticks(range(0, columns, step), names[::step], rotation=upright, fontsize=small)
    step = -(-rows // 60)
    axes.set_yticks(range(0, rows, step), [_client_name(client, groups) for client in clients[::step]], fontsize=small)
    axes.set_xlabel("class")
    axes.set_ylabel("client" if rows == len(counts) else f"client ({rows} of {len(counts)})")
    if rows <= 30 and columns <= 30:
        for (row, column), value in np.ndenumerate(shown):
            if value:
                dark = value > 0.4 * shown.max()
                axes.text(
                    column, row, str(value), ha="center", va="center", fontsize=6, color="white" if dark else "black"
                )
    bars = figure.add_subplot(grid[1], sharey=axes)
    bars.barh(range(rows), shown.sum(axis=1), color="#2c7fb8", height=0.8)
    bars.tick_params(axis="y", labelleft=False, left=False)
    bars.tick_params(axis="x", labelsize=small, rotation=90)
    bars.set_xlabel("samples")
    bars.spines[["top", "right"]].set_visible(False)
    figure.colorbar(image, ax=[axes, bars], label="training samples", fraction=0.04, pad=0.02)
    return figure


def partition_table(
    counts: Ints,
    class_names: Sequence[str],
    max_clients: int = 40,
    max_classes: int = 16,
    groups: Sequence[str] | None = None,
    unlabeled: Ints | None = None,
    names: Sequence[str] = (),
    evaluated: Mapping[str, Ints] | None = None,
) -> Table:
    """Table for the terminal, with one row per client and one column per class.

    Args:
        counts: Samples of each class at each client, shape (m, C).
        class_names: A name for each class.
        max_clients: Greatest number of rows; a last row then gives the number of clients not shown.
        max_classes: With more classes, one column lists each client's most frequent ones instead.
        groups: A label of each client, such as its domain, for an additional column; None for no such column.
        unlabeled: Number of unlabeled samples of each client, shape (m,), for an additional column; None for none.
        names: A name for each client, for an additional column.
        evaluated: Numbers of each client's samples of further parts, shape (m,), by part, for additional columns.

    Returns:
        The table, to be printed by rich.

    Raises:
        ValueError: If the shapes do not match.

    Example:
        >>> import numpy as np
        >>> from rich import print
        >>> print(partition_table(np.array([[3, 0], [1, 4]]), ["cat", "dog"]))  # doctest: +NORMALIZE_WHITESPACE
        2 clients, 2 classes, 8 training
                    samples
        <BLANKLINE>
          client   samples   cat   dog
         ──────────────────────────────
               0         3     3     ·
               1         5     1     4
        <BLANKLINE>
    """
    check_counts(counts, class_names, groups)
    num_clients, num_classes = counts.shape
    wide = num_classes <= max_classes
    title = f"{num_clients} clients, {num_classes} classes, {int(counts.sum())} training samples"
    title += "" if unlabeled is None else f", {int(unlabeled.sum())} unlabeled"
    table = Table(title=title, box=SIMPLE_HEAD)
    leading = ["client", *(["name"] if names else []), *(["group"] if groups else []), "samples"]
    sizes = {**(evaluated or {}), **({} if unlabeled is None else {"unlabeled": unlabeled})}
    leading += [*sizes, *([] if wide else ["classes"])]
    for name in leading:
        table.add_column(name, justify="right", no_wrap=True)
    digits = len(str(int(counts.max())))
    for name in class_names if wide else ["most frequent"]:
        table.add_column(escape(str(name)), justify="right" if wide else "left", overflow="fold", min_width=digits)
    for client, row in enumerate(counts[:max_clients]):
        cells = [str(int(value)) if value else "[dim]·[/dim]" for value in row]
        rest = cells if wide else [str(int((row > 0).sum())), _most_frequent(row, class_names)]
        others = [str(int(values[client])) for values in sizes.values()]
        named = [escape(names[client])] if names else []
        table.add_row(
            str(client), *named, *([escape(groups[client])] if groups else []), str(int(row.sum())), *others, *rest
        )
    if num_clients > max_clients:
        table.add_row(f"+{num_clients - max_clients}")
    return table


def check_counts(counts: Ints, class_names: Sequence[str], groups: Sequence[str] | None = None) -> None:
    """Check that a table of counts matches the class names and the clients' groups.

    Raises:
        ValueError: If it does not.
    """
    if counts.ndim != 2 or counts.shape[0] == 0 or counts.shape[1] != len(class_names):
        raise ValueError(f"expected counts of shape (clients, {len(class_names)} classes), got {counts.shape}")
    if groups is not None and len(groups) != counts.shape[0]:
        raise ValueError(f"expected a group for each of {counts.shape[0]} clients, got {len(groups)}")


def _client_name(client: int, groups: Sequence[str] | None) -> str:
    return f"{groups[client]} {client}".strip().replace("$", r"\$") if groups else str(client)


def _most_frequent(row: Ints, class_names: Sequence[str], most: int = 5) -> str:
    order = [int(c) for c in np.argsort(-row, kind="stable")[:most] if row[c] > 0]
    rest = int((row > 0).sum()) - len(order)
    named = ", ".join(f"{escape(str(class_names[c]))} {int(row[c])}" for c in order)
    return named + (f", +{rest} more" if rest else "")
