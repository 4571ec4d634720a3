"""Runs of other options or rows than the study has now: found, named, and moved aside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.runs.changes import Change, in_words
from pfl_lightning.runs.config import is_below
from pfl_lightning.runs.folder import RunFolder
from pfl_lightning.study.definition.options import short_path
from pfl_lightning.study.definition.plan import Run
from pfl_lightning.study.definition.study import Search
from pfl_lightning.study.run_state import RunState, changed_options, changes_of, state_of
from pfl_lightning.study.runner import claim

__all__ = ["by_options", "changed_before_search", "counted", "left_over", "move_aside", "refusal"]


def changed_before_search(run: Run, search: Search | None) -> list[Change]:
    """Options in which a run that waits for a search differs from what is there of it, but for those to be searched.

    Args:
        run: The run.
        search: What is searched of its cell.
    """
    searched = [short_path(path) for path in (search.space if search is not None else ())]
    return [change for change in changes_of(run) if not is_below(short_path(change.option), *searched)]


def move_aside(output: Path, runs: Sequence[Run]) -> Path:
    """Move the folders of runs to ``OUTPUT/replaced``.

    Args:
        output: Folder of the study.
        runs: The runs.

    Returns:
        Where they are now.

    Raises:
        ConfigurationError: Another process writes to one of them.
    """
    for run in runs:
        lock = claim(run)
        if lock is None:
            raise ConfigurationError(f"{run.name} is being run by another command: stop it first")
        lock.release()
    aside = output / "replaced" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    for run in runs:
        new = aside / run.folder.relative_to(output)
        new.parent.mkdir(parents=True, exist_ok=True)
        run.folder.rename(new)
    return aside


def refusal(output: Path, changed: Sequence[tuple[Run, list[Change]]]) -> str:
    """Which options differ, and which runs are concerned.

    Args:
        output: Folder of the study.
        changed: The runs, with these options.
    """
    return (
        f"{output} has {counted(len(changed), 'run')} made with different options:\n{by_options(changed)}\n"
        "Run them again with --restart, which keeps the old ones in another folder, or give another --output"
    )


def counted(number: int, what: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "run"), counted(2, "run")
        ('1 run', '2 runs')
    """
    return f"{number} {what}" + ("" if number == 1 else "s")


def by_options(changed: Sequence[tuple[Run, list[Change]]]) -> str:
    """A line for all runs in which the same options differ.

    Args:
        changed: The runs, with these options.
    """
    names: dict[str, list[str]] = {}
    for run, options in changed:
        names.setdefault(in_words(options), []).append(run.name)
    return "\n".join(f"{_few(some)}: {options}" for options, some in names.items())


def _few(names: Sequence[str]) -> str:
    return "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


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
        number = counted(len(seeds), "run")
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
