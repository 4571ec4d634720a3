"""The table of a study's finished runs, made by :mod:`pfl_lightning.report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfl_lightning.study.definition import Study
from pfl_lightning.study.plan import Run
from pfl_lightning.study.run_state import RunState, damaged_results, difference, finished_folder, state_of

__all__ = ["by_options", "counted", "print_tables"]


def print_tables(
    study: Study, runs: Sequence[Run], output: Path, console: Any, failed: Mapping[str, str] | None = None
) -> None:
    """Write the tables and curves of the finished runs to the study's folder, and print the table.

    Args:
        study: The study.
        runs: Its runs, of which some may be missing.
        output: Its folder.
        console: Where the table is printed.
        failed: Why runs have just failed, by name.
    """
    from pfl_lightning import report

    folders: dict[str, Path] = {}
    missing: dict[tuple[str, str], list[int]] = {}
    for run in runs:
        state, folder = state_of(run), finished_folder(run)
        if state is RunState.DONE and folder is not None:
            folders[run.name] = folder
        else:
            why = (failed or {}).get(run.name) or _why(run, state)
            missing.setdefault((run.cell.name, why), []).append(run.seed)
    said = [f"{name}, {_seeds(seeds)}{f' ({why})' if why else ''}" for (name, why), seeds in missing.items()]
    note = f"Missing: {'; '.join(said)}." if said else ""
    if not folders:
        changed = [run for run in runs if difference(run)]
        none = "no finished run was made with these options" if changed else "no run is finished"
        told = f":\n{by_options(changed)}\n" if changed else ". "
        console.print(f"{none}: there is no table yet{told}{note}", highlight=False, markup=False)
        return
    settings = report.ReportSettings(
        title=study.title + (f" (scale {study.scale})" if study.scale else ""),
        choice=study.choice,
        figure=study.figure,
        target_accuracy=study.target_accuracy,
        source=study.published.source,
        note=note,
        expected_runs=len(runs),
    )
    rows = _rows(study, runs, folders)
    written = report.write_report(rows, output, settings)
    console.print(report.live_table(rows, settings))
    if note:
        console.print(note, highlight=False, markup=False)
    console.print(f"Written to {output}: {', '.join(path.name for path in written)}", highlight=False, markup=False)


def _rows(study: Study, runs: Sequence[Run], folders: Mapping[str, Path]) -> list[Any]:
    from pfl_lightning.report import Row

    cells: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.cell.setting, run.cell.label), []).append(run)
    return [
        Row(
            label,
            setting,
            tuple(folders[run.name] for run in some if run.name in folders),
            published=study.published.figures.get(setting, {}).get(label),
            planned=len(some),
            trials=some[0].cell.search.trials if some[0].cell.search is not None else 0,
        )
        for (setting, label), some in cells.items()
    ]


def _why(run: Run, state: RunState) -> str:
    """Why a run is not in the table."""
    if state is RunState.UNFINISHED and (damaged := damaged_results(run)) is not None:
        return f"{damaged} cannot be read; the same command writes it again"
    return {
        RunState.CHANGED: f"made with other options: {difference(run)}",
        RunState.WAITING: "not searched yet",
        RunState.UNFINISHED: "not finished",
    }.get(state, "")


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"


def counted(number: int, what: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "run"), counted(2, "run")
        ('1 run', '2 runs')
    """
    return f"{number} {what}" + ("" if number == 1 else "s")


def by_options(changed: Sequence[Run]) -> str:
    """A line for all runs in which the same options differ.

    Args:
        changed: The runs.
    """
    names: dict[str, list[str]] = {}
    for run in changed:
        names.setdefault(difference(run), []).append(run.name)
    more = {options: f"; and {len(some) - 3} more" if len(some) > 3 else "" for options, some in names.items()}
    return "\n".join(f"{'; '.join(some[:3])}{more[options]}: {options}" for options, some in names.items())
