"""Curves of single clients: a file that grows with each evaluation of a run, and their picture."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pfl_lightning.runs.files import CURVES
from pfl_lightning.runs.results import Values, csv_text
from pfl_lightning.state.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = ("round", "client", "part", "metric", "value")

Row = tuple[int, int, str, str, float]
"""Round (from 1), client, part (``"test"``, ``"validation"``), metric and value."""


def add_to_curves(folder: Path, round: int, parts: Mapping[str, Values]) -> None:
    """Append what an evaluation has found.

    Args:
        folder: The run's folder.
        round: The round that was evaluated, from 1.
        parts: Values of clients by metric, by part.
    """
    rows = [
        (round, client, part, metric, value)
        for part, values in parts.items()
        for metric, own in values.items()
        for client, value in own.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CURVES
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        file.write(csv_text([COLUMNS, *rows] if is_new else rows))


def cut_curves(folder: Path, rounds: int) -> None:
    """Leave the first rounds of the file, which a run goes on from; none of a run that begins."""
    path = folder / CURVES
    if path.exists():
        kept = [row for row in read_curves(folder) if row[0] <= rounds]
        if kept:
            with replace_file(path) as temporary:
                temporary.write_text(csv_text([COLUMNS, *kept]), newline="")
        else:
            path.unlink()


def read_curves(folder: Path) -> list[Row]:
    """The rows of a run's file, of which a kill may have cut the last one; none where there is no file."""
    found: list[Row] = []
    with suppress(FileNotFoundError), (folder / CURVES).open(newline="") as file:
        for row in csv.DictReader(file):
            with suppress(TypeError, ValueError):
                found.append((int(row["round"]), int(row["client"]), row["part"], row["metric"], float(row["value"])))
    return found


def draw_clients(panel: Axes, rows: Iterable[Row], part: str = "test", metric: str = "accuracy") -> bool:
    """Draw a thin line for each client and a thick one for their mean, in %; returns whether there was any.

    Args:
        panel: Where.
        rows: What :func:`read_curves` gives.
        part: Of which parts.
        metric: Of which metric.
    """
    lines: dict[int, list[tuple[int, float]]] = {}
    means: dict[int, list[float]] = {}
    for round, client, of_part, name, value in rows:
        if (of_part, name) == (part, metric):
            lines.setdefault(client, []).append((round, 100 * value))
            means.setdefault(round, []).append(100 * value)
    for points in lines.values():
        panel.plot(*zip(*points, strict=True), color="C0", alpha=0.3, linewidth=0.7, marker="." * (len(points) == 1))
    if lines:
        panel.plot([*means], [sum(some) / len(some) for some in means.values()], color="black", label="mean")
        label = f"{part} {metric.replace('_', ' ')}, %"
        panel.set(xlabel="round", ylabel=label)
        panel.grid(alpha=0.3)
    return bool(lines)
