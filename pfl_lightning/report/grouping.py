"""Groups runs into the rows of a comparison: seeds together, other data apart, named by what differs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pfl_lightning.errors import UsageError
from pfl_lightning.report.rows import MeasuredRow
from pfl_lightning.report.rows import blocks as blocks_of
from pfl_lightning.runs.config import differing, same_options, short_names, show
from pfl_lightning.runs.folder import NO_SETTING
from pfl_lightning.runs.results import FinishedRun, Source

__all__ = ["Group", "apart_by_data", "data_options", "group_runs", "row_labels", "values_of"]

OF_TRAINING = ("batch_size", "eval_batch_size", "augment", "drop_last", "normalize", "mean", "std", "num_workers")
"""Options of data modules under which the clients still hold the same samples."""


def group_runs(runs: Iterable[FinishedRun], labels: Sequence[str] | None = None) -> list[MeasuredRow]:
    """Group runs that differ in their seeds only, into a block for each data set and partition.

    Of two runs with equal seeds in one folder of runs the later one counts; of those in different folders, too, with a
    warning. What a run without a config had is not known: such a run of equal seeds in another folder is a row of its
    own. Runs that are not finished are none of the finished ones' rows. Runs of a study have its names of settings and
    rows. Another row is called by its method and by the options in which it differs from other rows of its block; by
    its folder, too, where no option differs.

    Args:
        runs: Runs.
        labels: Names of the rows, in the order of the blocks and of their rows.

    Raises:
        UsageError: There are more or fewer labels than rows, or two rows of a block have one label.
    """
    blocks: list[list[Group]] = []
    known = list(runs)
    fixed = _fixed_partitions(known)
    for run in known:
        fitting = (
            block
            for block in blocks
            if all(_of_one_table(run, other) and _may_be_one(run, other, fixed) for row in block for other in row)
        )
        block = next(fitting, None)
        if block is None:
            block = []
            blocks.append(block)
        _add(block, run)
    found = [(block, name) for block in blocks for name in row_labels(block)]
    names = [name for _, name in found]
    if labels is not None and len(labels) != len(names):
        raise UsageError(f"--labels has {len(labels)} names for {len(names)} configurations: {'; '.join(names)}")
    settings = [title for title, block in zip(_titles(blocks), blocks, strict=True) for _ in block]
    for (label, setting), times in Counter(zip(labels or names, settings, strict=True)).items():
        if times > 1:
            raise UsageError(f"--labels: {times} rows would be called {label!r}{f' in {setting}' if setting else ''}")
    rows = [tuple(row) for block in blocks for row in block]
    return [
        MeasuredRow(label, setting, row, planned=len(row), trials=None)
        for label, setting, row in zip(labels or names, settings, rows, strict=True)
    ]


def apart_by_data(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """Rows of a study, of which those with other data, or another partition, get a block of their own.

    Rows without runs, whose data are not known, have a block of their own beside several others.

    Args:
        rows: Rows, by setting.
    """
    found = []
    for setting, some in blocks_of(rows).items():
        groups: list[list[MeasuredRow]] = []
        for row in some:
            group = next((g for g in groups if row.runs and _of_one_rule(g[0].runs[0], row.runs[0])), None)
            if group is not None:
                group.append(row)
            elif row.runs:
                groups.append([row])
        if len(groups) < 2:
            found += some
            continue
        titles = _numbered(_data_titles([[list(row.runs) for row in group] for group in groups]))
        without = [row for row in some if not row.runs]
        for title, group in zip([*titles, "no finished run"], [*groups, without], strict=True):
            block = ": ".join(filter(None, [setting, title]))
            found += [replace(row, setting=block, of_setting=setting) for row in group]
    return found


def _of_one_rule(run: FinishedRun, other: FinishedRun) -> bool:
    """Whether the options of two runs say the same data and partition, whatever their seeds and fingerprints."""
    known = run.num_clients == other.num_clients and run.data.name == other.data.name
    return known and all(_same_data_options(run, other, part) for part in ("", "partition"))


def _same_data_options(run: FinishedRun, other: FinishedRun, part: str) -> bool:
    """Whether options are equal; one that is missing, as before a version of the package that has it, is null."""
    return same_options(data_options(run, part), data_options(other, part), missing=None)


def _add(block: list[Group], run: FinishedRun) -> None:
    for row in block:
        if not _of_one_row(run, row):
            continue
        earlier = [other for other in row if other.seeds == run.seeds]
        if not run.config and any(other.path.parent != run.path.parent for other in earlier):
            continue
        for other in earlier:
            if other.path.parent != run.path.parent:
                warnings.warn(
                    f"{other.path} is left out: {run.path} has the same options and seeds, and counts in its place",
                    stacklevel=4,
                )
        row[:] = [other for other in row if other.seeds != run.seeds] + [run]
        return
    block.append([run])


def _of_one_row(run: FinishedRun, row: Group) -> bool:
    first = row[0]
    if run.finished != first.finished or bool(run.config) != bool(first.config):
        return False
    return same_options(first.options, run.options) and len({_study_row(one) for one in (*row, run)} - {""}) < 2


def _study_row(run: FinishedRun) -> str:
    """What a study calls the run's row; empty for a run that is none of a study."""
    return run.place.row if run.place is not None else ""


def _study_setting(run: FinishedRun) -> str:
    return run.place.setting if run.place is not None else ""


def _fixed_partitions(runs: Iterable[FinishedRun]) -> set[str]:
    """Fingerprints of partitions that several seeds have: such a partition does not follow the seed."""
    seeds: dict[str, set[int]] = {}
    for run in runs:
        seeds.setdefault(run.partition.fingerprint, set()).add(run.seed)
    return {fingerprint for fingerprint, some in seeds.items() if fingerprint and len(some) > 1}


def _may_be_one(run: FinishedRun, other: FinishedRun, fixed: set[str]) -> bool:
    """Whether different partitions may be those of two seeds, as far as fingerprints say where options do not."""
    if run.config and other.config:
        return True
    one, another = run.partition.fingerprint, other.partition.fingerprint
    return one == another or not (one and another) or not {one, another} & fixed


def _of_one_table(run: FinishedRun, other: FinishedRun) -> bool:
    """Whether two runs are of the same data and, of one study, of the same setting."""
    one_study = run.place is not None and other.place is not None and run.place.study == other.place.study
    return not (one_study and _study_setting(run) != _study_setting(other)) and _same_data(run, other)


def _same_data(run: FinishedRun, other: FinishedRun) -> bool:
    """Whether two runs are of the same data, divided by the same rule; what is not known does not tell them apart."""
    if run.num_clients != other.num_clients or not _same_source(run.data, other.data):
        return False
    if run.config and other.config and not _same_data_options(run, other, ""):
        return False
    if run.partition.fingerprint and run.partition.fingerprint == other.partition.fingerprint:
        return True  # by whatever rule
    if _seeds_of_data(run) == _seeds_of_data(other) and run.partition.fingerprint and other.partition.fingerprint:
        return False
    named = run.partition.name == other.partition.name or not (run.partition.name and other.partition.name)
    both = bool(run.config and other.config)
    return named and (not both or _same_data_options(run, other, "partition"))


def _same_source(one: Source, other: Source) -> bool:
    if one.fingerprint and other.fingerprint:
        return one.fingerprint == other.fingerprint
    return one.name == other.name or not (one.name and other.name)


def _seeds_of_data(run: FinishedRun) -> tuple[int, ...]:
    return (run.seed, *run.data_seeds)


def data_options(run: FinishedRun, part: str = "") -> dict[str, Any]:
    """The options of the partition, or those of the data without it and without what the training alone sees."""
    found = {}
    for path, value in run.options.items():
        _, first, *_ = (*path.split("."), "", "")
        if (
            path.split(".")[0] == "data"
            and (first == "partition") == (part == "partition")
            and first not in OF_TRAINING
        ):
            found[path] = value
    return found


def _titles(blocks: Sequence[list[Group]]) -> list[str]:
    """Names of the blocks: settings of a study, or what differs; empty for one alone."""
    if len(blocks) < 2:
        return [""] * len(blocks)
    settings = [{_study_setting(run) for row in block for run in row} for block in blocks]
    names = ["".join(some) if len(some) == 1 else "" for some in settings]
    if any(names):  # beside settings with names, a study's folder "all" is that of one with this name
        whole = [all(run.place is not None for row in block for run in row) for block in blocks]
        names = [name or (NO_SETTING if of_study else "") for name, of_study in zip(names, whole, strict=True)]
    if all(names) and len({*names}) == len(names):
        return names
    data = _data_titles(blocks)
    return _numbered([": ".join(filter(None, [name, title])) for name, title in zip(names, data, strict=True)])


def _numbered(titles: Sequence[str]) -> list[str]:
    """Titles, of which equal ones get numbers."""
    seen = Counter(titles)
    return [
        title if seen[title] == 1 else f"{title} ({titles[:place].count(title) + 1})"
        for place, title in enumerate(titles)
    ]


def _data_titles(blocks: Sequence[list[Group]]) -> list[str]:
    """Names of the blocks by their data; equal where the data are."""
    firsts = [block[0][0] for block in blocks]
    options = [{**data_options(run, ""), **data_options(run, "partition")} for run in firsts]
    paths = [path for path in differing(options) if path not in ("data", "data.partition")]
    named = [
        ", ".join(filter(None, [run.data.name, run.partition.name, *values_of(one, paths)])) or "other data"
        for run, one in zip(firsts, options, strict=True)
    ]
    clients = {run.num_clients for run in firsts}
    if len(clients) > 1 and not any(path.endswith("num_clients") for path in paths):
        named = [f"{name}, {run.num_clients} clients" for name, run in zip(named, firsts, strict=True)]
    marks = [_fingerprints(run) for run in firsts]
    return [
        name if named.count(name) == 1 or not mark else f"{name} ({mark})"
        for name, mark in zip(named, marks, strict=True)
    ]


def _fingerprints(run: FinishedRun) -> str:
    short = [
        f"{what} {source.fingerprint.rpartition(':')[2][:8]}"
        for what, source in (("data", run.data), ("partition", run.partition))
        if source.fingerprint
    ]
    return ", ".join(short)


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
