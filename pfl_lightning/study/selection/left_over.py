"""Runs in a study's folder of rows that its file does not have, such as those of a row that was renamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pfl_lightning.cli.runs.folders import RunFolder
from pfl_lightning.study.definition.plan import Run
from pfl_lightning.study.runs.state import RunState, changed_options, state_of

__all__ = ["left_over"]


def left_over(output: Path, runs: Sequence[Run]) -> list[str]:
    """A line for each folder of a row with runs, but without a row of the study; empty where there is none.

    Args:
        output: Folder of the study.
        runs: The runs of all its rows, done or not.
    """
    top = output / "runs"
    known = {str(run.cell.path).casefold() for run in runs}
    found = []
    for row in sorted(path for path in top.glob("*/*") if path.is_dir()):
        seeds = [seed for seed in sorted(row.glob("seed_*")) if RunFolder(seed).versions()]
        if not seeds or str(row.relative_to(top)).casefold() in known:
            continue
        number = "1 run" if len(seeds) == 1 else f"{len(seeds)} runs"
        found.append(f"{row}: {number} of a row that the study does not have{_renamed(row, seeds, runs)}")
    return found


def _renamed(row: Path, seeds: Sequence[Path], runs: Sequence[Run]) -> str:
    """Which row of the study, of which nothing was run, has the options of another folder."""
    new = next((run for run in runs if any(_would_be(run, seed) for seed in seeds)), None)
    if new is None:
        return ""
    return f"; {new.cell.name} has its options: to keep the runs, rename that folder to {new.folder.parent}"


def _would_be(run: Run, folder: Path) -> bool:
    """Whether a folder has what a new run would make."""
    if folder.name != f"seed_{run.seed}" or state_of(run) is not RunState.NEW:
        return False
    there = replace(run, folder=folder)
    return there.config_file.is_file() and not run.folder.parent.exists() and not changed_options(there)
