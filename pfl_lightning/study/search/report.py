"""What a search found, as files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_lightning.state.files import replace_file
from pfl_lightning.study.definition.study import Dimension

__all__ = ["TriedOptions", "bound_notes", "option_text", "write_json", "write_table"]

NEAR = 0.05
"""How much of a range, on its scale, counts as its end."""


@dataclass(frozen=True)
class TriedOptions:
    """A trial as it is reported.

    Attributes:
        number: Its number, from 0.
        state: ``"complete"``, ``"pruned"``, ``"fail"`` or ``"running"``.
        accuracy: Mean validation accuracy in [0, 1], of a complete one.
        options: Values by path of option.
        rounds: The last evaluated round.
    """

    number: int
    state: str
    accuracy: float | None
    options: Mapping[str, Any]
    rounds: int


def bound_notes(options: Mapping[str, Any], space: Mapping[str, Dimension]) -> list[str]:
    """Sentences on chosen values that lie at an end of what was tried, beyond which better ones may lie.

    Args:
        options: The chosen values, by path of option.
        space: What was tried, by path of option.
    """
    notes = []
    for path, tried in space.items():
        end = _end(options[path], tried) if path in options else ""
        if end:
            value, side = option_text(options[path]), "above" if end == "upper" else "below"
            notes.append(f"{path}: {value} is at the {end} end of what was tried; values {side} it may be better.")
    return notes


def _end(value: Any, tried: Dimension) -> str:
    """``"lower"``, ``"upper"``, or "" for a value between, and for one that has no order."""
    ends = _ends(tried)
    if ends is None:
        return ""
    low, high = ends
    if tried.choices:
        return "lower" if value == low else "upper" if value == high else ""
    scale = math.log if tried.log else float
    share = (scale(value) - scale(low)) / (scale(high) - scale(low))
    return "lower" if share <= NEAR else "upper" if share >= 1 - NEAR else ""


def _ends(tried: Dimension) -> tuple[float, float] | None:
    """The smallest and the largest number that may be tried; ``None`` where there is no order, or nothing beside."""
    if not tried.choices:
        return tried.low, tried.high
    numbers = [one for one in tried.choices if isinstance(one, int | float) and not isinstance(one, bool)]
    return (min(numbers), max(numbers)) if len(numbers) == len(tried.choices) and len(set(numbers)) > 1 else None


def write_json(path: Path, best: TriedOptions, rows: Sequence[TriedOptions]) -> None:
    """Write the trials and the best of them as JSON."""
    content = {"objective": "mean validation accuracy", "best": vars(best), "trials": [vars(row) for row in rows]}
    with replace_file(path, shared=True) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def write_table(path: Path, best: TriedOptions, rows: Sequence[TriedOptions], space: Mapping[str, Dimension]) -> None:
    """Write the trials as a table in Markdown, the best ones first, and which of the chosen values lie at an end."""
    options = list(space)
    ordered = sorted(rows, key=lambda row: (row.accuracy is None or row.state != "complete", -(row.accuracy or 0.0)))
    lines = [
        f"Chosen by mean validation accuracy: trial {best.number}. Test parts were not evaluated.\n",
        f"| trial | {' | '.join(options)} | validation accuracy | last evaluated round | |",
        f"|---|{'---|' * len(options)}---|---|---|",
    ]
    for row in ordered:
        values = " | ".join(option_text(row.options.get(path, "")) for path in options)
        shown = f"{100 * row.accuracy:.2f}" if row.accuracy is not None and row.state == "complete" else "-"
        note = "chosen" if row is best else "" if row.state == "complete" else row.state
        lines.append(f"| {row.number} | {values} | {shown} | {row.rounds or '-'} | {note} |")
    notes = [f"- {note}" for note in bound_notes(best.options, space)]
    with replace_file(path, shared=True) as temporary:
        temporary.write_text("\n".join(lines + [""] * bool(notes) + notes) + "\n")


def option_text(value: Any) -> str:
    """A value as people read it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
