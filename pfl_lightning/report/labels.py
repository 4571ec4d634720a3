"""Names of the rows of a comparison: what differs between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfl_lightning.runs.config import differing, short_names, show
from pfl_lightning.runs.results import FinishedRun

__all__ = ["Group", "row_labels", "values_of"]

Group = list[FinishedRun]
"""Runs of one row, which differ in their seeds."""


def row_labels(block: Sequence[Group]) -> list[str]:
    """Names of the rows of a block."""
    firsts = [row[0] for row in block]
    known = [run.options for run in firsts if run.config]  # what a run without a config had is not known
    everywhere = [path for path in differing(known) if _tells(path)] if known else []
    labels = []
    for run in firsts:
        same = [other for other in firsts if other.method == run.method]
        shared = [path for path in run.options if all(path in other.options for other in same)]
        paths = differing([other.options for other in same])
        if not all(other.config for other in same):
            paths = [path for path in paths if path in shared]
        paths = list(dict.fromkeys([*paths, *everywhere]))
        labels.append(", ".join([run.method, *values_of(run.options, paths)]))
    labels = [given or label for given, label in zip(_study_labels(block), labels, strict=True)]
    labels = [label if run.finished else f"{label}, unfinished" for label, run in zip(labels, firsts, strict=True)]
    named = [
        label if labels.count(label) == 1 else f"{label} ({_folder(run, firsts)})"
        for label, run in zip(labels, firsts, strict=True)
    ]
    for name in {name for name in named if named.count(name) > 1}:
        places = [place for place, other in enumerate(named) if other == name]
        for place, folder in zip(places, _differing_folders([firsts[one].path for one in places]), strict=True):
            named[place] = f"{labels[place]} ({folder})"
    return named


def _differing_folders(paths: Sequence[Path]) -> list[str]:
    """The last folders in which paths differ; the whole paths where these do not tell them apart."""
    parts = [path.parts for path in paths]
    common = next((n for n, last in enumerate(zip(*(one[::-1] for one in parts), strict=False)) if len({*last}) > 1), 0)
    names = [one[len(one) - 1 - common] for one in parts]
    return names if len({*names}) == len(names) else [path.as_posix() for path in paths]


def _study_labels(block: Sequence[Group]) -> list[str]:
    """What studies call the rows; empty for other rows.

    Where several rows have a name, because several studies have such a row or somebody has made further runs in the
    folder of one, the study and the options that differ are added.
    """
    places = [next((run.place for run in row if run.place is not None), None) for row in block]
    found = []
    for place, row in zip(places, block, strict=True):
        if place is None:
            found.append("")
            continue
        same = [number for number, other in enumerate(places) if other is not None and other.row == place.row]
        several = len({other.study for number in same if (other := places[number]) is not None}) > 1
        paths = differing([block[number][0].options for number in same])
        name = f"{place.row} ({place.study.name})" if several else place.row
        found.append(", ".join([name, *values_of(row[0].options, paths)]))
    return found


def _tells(path: str) -> bool:
    """Whether an option of a run names it beside its method: not those of methods, and not those with a column."""
    return not path.startswith(("model.method", "personalize")) and path != "rounds"


def values_of(options: Mapping[str, Any], paths: Sequence[str]) -> list[str]:
    """Options as ``name=value``, by names that are as short as they can be."""
    names = short_names(paths)
    return [f"{names[path]}={show(options[path])}" for path in paths if path in options]


def _folder(run: FinishedRun, runs: Sequence[FinishedRun]) -> str:
    """The folder, with its version where others share it."""
    path = run.path
    if not path.name.startswith("version_"):
        return path.name
    shared = sum(other.path.parent == path.parent for other in runs) > 1
    return f"{path.parent.name}/{path.name}" if shared else path.parent.name
