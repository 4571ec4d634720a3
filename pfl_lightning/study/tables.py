"""The table of a study's finished runs, made by :mod:`pfl_lightning.report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfl_lightning.runs.changes import in_words
from pfl_lightning.study.changed import by_options, changed_before_search, counted
from pfl_lightning.study.definition.plan import Run
from pfl_lightning.study.definition.study import Study
from pfl_lightning.study.run_state import (
    RunState,
    changes_of,
    finished_folder,
    others_versions,
    state_of,
    unreadable_results,
)
from pfl_lightning.study.searches import search_of

__all__ = ["print_tables"]


def print_tables(
    study: Study,
    runs: Sequence[Run],
    output: Path,
    console: Any,
    waiting: Sequence[Run] = (),
    failed: Mapping[str, str] | None = None,
) -> None:
    """Write the tables and curves of the finished runs to the study's folder, and print the table.

    Args:
        study: The study.
        runs: Its runs, of which some may be missing.
        output: Its folder.
        console: Where the table is printed.
        waiting: Runs whose options must be searched first, which are missing.
        failed: Why runs have just failed, by name.
    """
    from pfl_lightning import report

    folders = {run.name: found for run in runs if (found := _result(run)) is not None}
    rows, settings = _rows(study, [*runs, *waiting], folders), _settings(study, runs, waiting, folders, failed or {})
    if not folders:
        console.print(f"{_no_table(runs)}{settings.note}", highlight=False, markup=False)
        return
    written = report.write_report(rows, output, settings)
    console.print(report.live_table(rows, settings))
    if settings.note:
        console.print(settings.note, highlight=False, markup=False)
    console.print(f"Written to {output}: {', '.join(path.name for path in written)}", highlight=False, markup=False)


def _no_table(runs: Sequence[Run]) -> str:
    """Why there is no table: no run is finished, or those that are were made with other options."""
    changed = [(run, changes) for run in runs if (changes := changes_of(run))]
    if not changed:
        return "no run is finished: there is no table yet. "
    return (
        "no finished run was made with these options: there is no table yet. "
        f"{counted(len(changed), 'run')} left out, made with other options:\n{by_options(changed)}\n"
    )


def _result(run: Run) -> Path | None:
    """The folder of a finished run that was made with the options that the study has now."""
    return finished_folder(run) if state_of(run) is RunState.DONE else None


def _rows(study: Study, runs: Sequence[Run], folders: Mapping[str, Path]) -> list[Any]:
    from pfl_lightning.report import Row

    cells: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.cell.setting, run.cell.label), []).append(run)
    settings, methods = list(study.settings), list(study.methods)
    groups = sorted(  # rows that wait for a search stand where they will be
        cells.values(), key=lambda some: (settings.index(some[0].cell.setting), methods.index(some[0].cell.method))
    )
    found = []
    for some in groups:
        cell = some[0].cell
        search = search_of(study, cell)
        found.append(
            Row(
                cell.label,
                cell.setting,
                tuple(folders[run.name] for run in some if run.name in folders),
                published=study.published.figures.get(cell.setting, {}).get(cell.label),
                planned=len(some),
                trials=search.trials if search is not None else 0,
            )
        )
    return found


def _settings(
    study: Study, runs: Sequence[Run], waiting: Sequence[Run], folders: Mapping[str, Path], failed: Mapping[str, str]
) -> Any:
    from pfl_lightning.report import ReportSettings

    missing: dict[tuple[str, str], list[int]] = {}
    for run in [*runs, *waiting]:
        if run.name not in folders:
            why = failed.get(run.name) or (_why_waiting(study, run) if run in waiting else _why(run))
            missing.setdefault((run.cell.name, why), []).append(run.seed)
    said = [f"{name}, {_seeds(seeds)}{f' ({why})' if why else ''}" for (name, why), seeds in missing.items()]
    others = [str(one) for run in runs if state_of(run) is not RunState.CHANGED for one in others_versions(run)]
    return ReportSettings(
        title=study.title + (f" (scale {study.scale})" if study.scale else ""),
        choice=study.choice,
        figure=study.figure,
        target_accuracy=study.target_accuracy,
        source=study.published.source,
        note=" ".join(
            f"{what}: {'; '.join(names)}."
            for what, names in (("Missing", said), ("Not of this study, made by hand with other options", others))
            if names
        ),
        expected_runs=len(runs) + len(waiting),
    )


def _why_waiting(study: Study, run: Run) -> str:
    """Why a run of a row that is not searched is not in the table, of which an earlier search may have left runs."""
    options = changed_before_search(run, search_of(study, run.cell))
    return f"made with other options: {in_words(options)}" if options else "not searched yet"


def _why(run: Run) -> str:
    """Why a run is not in the table."""
    match state_of(run):
        case RunState.CHANGED:
            return f"made with other options: {in_words(changes_of(run))}"
        case RunState.UNFINISHED:
            damaged = unreadable_results(run)
            return "not finished" if damaged is None else f"{damaged} cannot be read; the same command writes it again"
    return ""


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
