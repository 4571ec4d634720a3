"""A trial of a search: a run of which the validation accuracy is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from pfl_lightning.jobs.local import LocalStarter
from pfl_lightning.jobs.supervision import Job, Jobs, Starter, StoppedError
from pfl_lightning.study.definition.options import Config
from pfl_lightning.study.definition.plan import Cell, Run, in_folder
from pfl_lightning.study.runs.progress import Progress, read_progress
from pfl_lightning.study.runs.runner import run_job, start_over
from pfl_lightning.study.runs.state import changed_options, finished_folder, is_in_use

__all__ = ["accuracy_of", "evaluated_round", "run_trial", "trial_job", "trial_run"]


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
    if jobs.stopped is not None:
        raise StoppedError(jobs.stopped)
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
