"""Rows of a grid: each combination of values, and what a row is called by them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pfl_lightning.runs.config import short_names
from pfl_lightning.study.definition.options import short_path

__all__ = ["grid_points"]


def grid_points(grid: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Label and options of each combination; one without options where there is no grid.

    Args:
        grid: Values by path of their option.

    Example:
        >>> [label for label, _ in grid_points({"model.method.lr": [0.1], "model.encoder": ["my.CNN", "my.MLP"]})]
        [', lr=0.1, encoder=CNN', ', lr=0.1, encoder=MLP']
    """
    names = short_names([short_path(path) for path in grid])
    texts = {path: _texts(values) for path, values in grid.items()}
    for indices in itertools.product(*(range(len(values)) for values in grid.values())):
        chosen = list(zip(grid, indices, strict=True))
        label = "".join(f", {names[short_path(path)]}={texts[path][index]}" for path, index in chosen)
        yield label, [(path, grid[path][index]) for path, index in chosen]


def _texts(values: Sequence[Any]) -> list[str]:
    """What the values of an option are called: classes without their packages, where that tells them apart."""
    for text in (_short, _with_arguments):
        found = [text(value) for value in values]
        if len(set(found)) == len(found):
            return found
    return [str(value) for value in values]


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and "class_path" in value:
        value = str(value["class_path"])
    is_import_path = isinstance(value, str) and all(part.isidentifier() for part in value.split("."))
    return str(value).rpartition(".")[2] if is_import_path else str(value)


def _with_arguments(value: Any) -> str:
    arguments = value.get("init_args") if isinstance(value, Mapping) and "class_path" in value else None
    if not isinstance(arguments, Mapping):
        return str(value)
    return f"{_short(value)}({', '.join(f'{name}={one}' for name, one in arguments.items())})"
