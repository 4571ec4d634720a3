"""Trials of a search: runs of which the validation accuracy is wanted, and the files that tell of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_lightning.jobs.processes import LocalStarter
from pfl_lightning.jobs.supervision import Job, Jobs, Starter
from pfl_lightning.state.files import replace_file
from pfl_lightning.study.definition.options import Config
from pfl_lightning.study.definition.plan import Cell, Run, in_folder
from pfl_lightning.study.definition.study import Dimension
from pfl_lightning.study.run_state import Progress, changed_options, finished_folder, is_in_use, read_progress
from pfl_lightning.study.runner import run_job, start_over

__all__ = [
    *("TriedOptions", "accuracy_of", "bound_notes", "evaluated_round", "option_text", "run_trial", "trial_job"),
    *("trial_run", "write_json", "write_table"),
]


def run_trial(
    config: Config,
    folder: Path,
    *,
    choice: str = "last",
    on_round: Callable[[int, float], bool] | None = None,
    threads: int = 1,
    starter: Starter | None = None,
) -> float | None:
    """Run a trial, or go on with it; one that was finished with the same config is not run again.

    Args:
        config: The config of the trial, with its seed.
        folder: Its folder; it gets ``run.yaml``, ``log.txt``, ``progress.json`` and ``version_0``.
        choice: ``"last"`` for the accuracy of the last evaluated round, otherwise the highest one of a round.
        on_round: Called after each evaluated round with its number, from 1, and its mean validation accuracy; where it
            returns true the trial ends.
        threads: Threads of its process.
        starter: Starts its process; by default on this machine.

    Returns:
        Its mean validation accuracy in [0, 1]; ``None`` if it failed, was ended early or has no validation parts.
    """
    run, jobs, seen = trial_run(config, folder), Jobs(starter or LocalStarter()), 0

    def wanted() -> Iterator[Job | None]:
        while is_in_use(run):  # by what a killed search has left, which saves itself and ends
            yield None
        if (job := trial_job(run, threads)) is not None:
            yield job

    with closing(jobs.run(wanted())) as events:
        for ended in events:
            progress = evaluated_round(run, seen) if ended is None and on_round is not None else None
            if on_round is not None and progress is not None:
                seen = progress.round
                if on_round(seen, progress.validation or 0.0):
                    return None
    return accuracy_of(run, choice)


def trial_run(config: Config, folder: Path) -> Run:
    """A trial as a run that is in no table."""
    folder.mkdir(parents=True, exist_ok=True)
    return Run(Cell("", folder.name, folder.name, config), 0, in_folder(config, folder), folder)


def trial_job(run: Run, threads: int) -> Job | None:
    """What is left to do of a trial; ``None`` if it is done. One of another config starts over."""
    if changed_options(run):
        start_over(run)
    return run_job(run, threads) if finished_folder(run) is None else None


def evaluated_round(run: Run, seen: int) -> Progress | None:
    """How far a trial is, if it has a validation accuracy of a round after one that was seen."""
    progress = read_progress(run.progress_file)
    return progress if progress is not None and progress.validation is not None and progress.round > seen else None


def accuracy_of(run: Run, choice: str) -> float | None:
    """The mean validation accuracy of a finished trial; ``None`` for one that failed or has no validation parts."""
    progress = read_progress(run.progress_file) if finished_folder(run) is not None else None
    if progress is None:
        return None
    return progress.validation if choice == "last" else progress.best_validation


# ---------------------------------------------------------------------- what is said of trials

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
