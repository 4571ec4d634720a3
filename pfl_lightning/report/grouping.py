"""Groups runs into the rows of a comparison: seeds together, other data apart, named by what differs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pfl_lightning.errors import UsageError
from pfl_lightning.report.rows import MeasuredRow
from pfl_lightning.report.rows import blocks as blocks_of
from pfl_lightning.runs.config import differing, same_options, short_names, show
from pfl_lightning.runs.results import FinishedRun

OF_TRAINING = ("batch_size", "eval_batch_size", "augment", "drop_last", "normalize", "mean", "std", "num_workers")
"""Options of data modules under which the clients still hold the same samples."""

Group = list[FinishedRun]
"""Runs of one row, which differ in their seeds."""

One = TypeVar("One")


def group_runs(runs: Iterable[FinishedRun], labels: Sequence[str] | None = None) -> list[MeasuredRow]:
    """Group runs that differ in their seeds only, into a block for each data set and partition.

    Of two runs with equal seeds in one folder of runs the later one counts; of those in different folders, too, with a
    warning. What a run without a config had is not known: such a run of equal seeds in another folder is a row of its
    own. Runs that are not finished are none of the finished ones' rows. Runs of a study have its names of settings and
    rows. Another row is called by its method and by the options in which it differs from other rows of its block; by
    the folder of its first run, too, where no option differs.

    Args:
        runs: Runs.
        labels: Names of the rows, in the order of the blocks and of their rows.

    Raises:
        UsageError: There are more or fewer labels than rows, or two rows of a block have one label.
    """
    known = list(runs)
    seeds: dict[str, set[int]] = {}
    for run in known:
        seeds.setdefault(run.partition.fingerprint, set()).add(run.seed)
    fixed = {fingerprint for fingerprint, some in seeds.items() if fingerprint and len(some) > 1}  # whatever the seed
    blocks = [_rows(block) for block in _apart(known, lambda run, other: _of_one_table(run, other, fixed))]
    found = [
        MeasuredRow(label, setting, tuple(row), planned=len(row), trials=None)
        for setting, block in zip(_titles(blocks), blocks, strict=True)
        for label, row in zip(row_labels(block), block, strict=True)
    ]
    if labels is None:
        return found
    if len(labels) != len(found):
        names = "; ".join(row.label for row in found)
        raise UsageError(f"--labels has {len(labels)} names for {len(found)} configurations: {names}")
    found = [replace(row, label=label) for row, label in zip(found, labels, strict=True)]
    name, times = Counter(row.name for row in found).most_common(1)[0]
    if times > 1:
        raise UsageError(f"--labels: {times} rows would be called {name!r}")
    return found


def _apart(some: Iterable[One], alike: Callable[[One, One], bool]) -> list[list[One]]:
    """Groups of what is alike, each with all others of its group."""
    groups: list[list[One]] = []
    for one in some:
        group = next((group for group in groups if all(alike(one, other) for other in group)), None)
        if group is None:
            groups.append(group := [])
        group.append(one)
    return groups


def apart_by_data(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    """Rows of a study, of which those with other data, or another partition, get a block of their own.

    Rows without runs, whose data are not known, have a block of their own beside several others.

    Args:
        rows: Rows, by setting.
    """
    found = []
    for setting, some in blocks_of(rows).items():
        groups = _apart((row for row in some if row.runs), lambda row, other: _of_one_rule(row.runs[0], other.runs[0]))
        if len(groups) < 2:
            found += some
            continue
        titles = _numbered([_data_title(group[0].runs[0], [one[0].runs[0] for one in groups]) for group in groups])
        without = [row for row in some if not row.runs]
        for title, group in zip([*titles, "no finished run"], [*groups, without], strict=True):
            block = ": ".join(filter(None, [setting, title]))
            found += [replace(row, setting=block, of_setting=setting) for row in group]
    return found


def _rows(block: Sequence[FinishedRun]) -> list[Group]:
    """The rows of a block; of runs with equal seeds in one of them the last one counts."""
    rows: list[Group] = []
    for run in block:
        for row in rows:
            elsewhere = [o for o in row if o.seeds == run.seeds and o.path.parent != run.path.parent]
            first, named = row[0], {one.place.row for one in (*row, run) if one.place is not None}
            of_one_row = run.finished == first.finished and bool(run.config) == bool(first.config) and len(named) < 2
            if not of_one_row or not same_options(first.options, run.options) or (elsewhere and not run.config):
                continue
            for other in elsewhere:
                warnings.warn(
                    f"{other.path} is left out: {run.path} has the same options and seeds, and counts instead",
                    stacklevel=4,
                )
            row[:] = [other for other in row if other.seeds != run.seeds] + [run]
            break
        else:
            rows.append([run])
    return rows


def _of_one_rule(run: FinishedRun, other: FinishedRun) -> bool:
    """Whether the options of two runs say the same data and partition, whatever their seeds and fingerprints."""
    known = run.num_clients == other.num_clients and run.data.name == other.data.name
    return known and all(_same_data_options(run, other, part) for part in ("", "partition"))


def _same_data_options(run: FinishedRun, other: FinishedRun, part: str) -> bool:
    """Whether options are equal; one that is missing, as before a version of the package that has it, is null."""
    return same_options(data_options(run, part), data_options(other, part), missing=None)


def _of_one_table(run: FinishedRun, other: FinishedRun, fixed: set[str]) -> bool:
    """Whether two runs are of the same data, divided by the same rule; what is not known does not tell them apart.

    Args:
        run: A run.
        other: Another one; of one study and another of its settings it is apart.
        fixed: Partitions that do not follow the seed, and so are no two seeds' of one rule.
    """
    one, another = run.place, other.place
    if one is not None and another is not None and one.study == another.study and one.setting != another.setting:
        return False
    both = bool(run.config and other.config)
    same_data = _agree(run.data.fingerprint, other.data.fingerprint)
    if same_data is None:
        same_data = _agree(run.data.name, other.data.name) is not False
    if run.num_clients != other.num_clients or not same_data or (both and not _same_data_options(run, other, "")):
        return False
    marks = run.partition.fingerprint, other.partition.fingerprint
    same_partition = _agree(*marks)
    of_one_seed = (run.seed, *run.data_seeds) == (other.seed, *other.data_seeds)
    if same_partition or (same_partition is False and (of_one_seed or (not both and not fixed.isdisjoint(marks)))):
        return bool(same_partition)
    if _agree(run.partition.name, other.partition.name) is False:
        return False
    return not both or _same_data_options(run, other, "partition")


def _agree(one: str, other: str) -> bool | None:
    """Whether two names are equal; ``None`` where one is not known."""
    return one == other if one and other else None


def data_options(run: FinishedRun, part: str = "") -> dict[str, Any]:
    """The options of the partition, or those of the data without it and without what the training alone sees."""
    found = {}
    for path, value in run.options.items():
        top, first, *_ = (*path.split("."), "", "")
        if top == "data" and (first == "partition") == (part == "partition") and first not in OF_TRAINING:
            found[path] = value
    return found


def _titles(blocks: Sequence[list[Group]]) -> list[str]:
    """Names of the blocks: settings of a study, or what differs; empty for one alone."""
    if len(blocks) < 2:
        return [""] * len(blocks)
    of_study = [
        {run.place.setting if run.place is not None else "" for row in block for run in row} for block in blocks
    ]
    settings = ["".join(some) if len(some) == 1 else "" for some in of_study]
    if all(settings) and len({*settings}) == len(settings):
        return settings
    firsts = [block[0][0] for block in blocks]
    data = [_data_title(run, firsts) for run in firsts]
    return _numbered([": ".join(filter(None, names)) for names in zip(settings, data, strict=True)])


def _numbered(titles: Sequence[str]) -> list[str]:
    """Titles, of which equal ones get numbers."""
    seen = Counter(titles)
    return [
        title if seen[title] == 1 else f"{title} ({titles[:place].count(title) + 1})"
        for place, title in enumerate(titles)
    ]


def _data_title(run: FinishedRun, firsts: Sequence[FinishedRun]) -> str:
    """The name of a run's data beside those of other blocks: data, partition, options that differ, and clients."""
    options = [{**data_options(one), **data_options(one, "partition")} for one in firsts]
    paths = [path for path in differing(options) if path not in ("data", "data.partition")]
    names = [run.data.name, run.partition.name, *values_of(run.options, paths)]
    if len({one.num_clients for one in firsts}) > 1 and not any(path.endswith("num_clients") for path in paths):
        names.append(f"{run.num_clients} clients")
    return ", ".join(filter(None, names)) or "other data"


def row_labels(block: Sequence[Group]) -> list[str]:
    """Names of the rows of a block: a study's, or the method's, and the options that differ; folders if none does."""
    firsts = [row[0] for row in block]
    names = [next((run.place.row for run in row if run.place is not None), row[0].method) for row in block]
    known = [run.options for run in firsts if run.config]  # what a run without a config had is not known
    without = ("model.method", "personalize", "rounds")  # of methods, and of a column
    everywhere = [path for path in differing(known) if not path.startswith(without)] if known else []
    labels = []
    for row, name in zip(block, names, strict=True):
        of_study = any(run.place is not None for run in row)
        others = names if of_study else [run.method for run in firsts]
        same = [run for run, other in zip(firsts, others, strict=True) if other == name]
        paths = differing([run.options for run in same])
        if not all(run.config for run in same):
            paths = [path for path in paths if all(path in run.options for run in same)]
        further = [] if of_study else everywhere
        label = ", ".join([name, *values_of(row[0].options, list(dict.fromkeys([*paths, *further])))])
        labels.append(label if row[0].finished else f"{label}, unfinished")
    times = Counter(labels)
    named = zip(labels, firsts, strict=True)
    return [f"{label} ({run.path.as_posix()})" if times[label] > 1 else label for label, run in named]


def values_of(options: Mapping[str, Any], paths: Sequence[str]) -> list[str]:
    """Options as ``name=value``, by names that are as short as they can be."""
    names = short_names(paths)
    return [f"{names[path]}={show(options[path])}" for path in paths if path in options]
