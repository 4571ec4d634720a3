"""Runs that train alike and differ in what clients do afterwards: one of them trains, the others go on after it."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_lightning.errors import RunLockedError
from pfl_lightning.report.runs.options import same_options
from pfl_lightning.state.run_lock import RunLock
from pfl_lightning.study.definition.plan import Run
from pfl_lightning.study.runs.state import RunState, finished_folder, flat_options, last_checkpoint, state_of

__all__ = ["SharedTraining", "Trained", "keep_checkpoints"]

AFTER_TRAINING = "personalize"
"""The section of a config that changes nothing before a run's last round is played."""


@dataclass(frozen=True)
class Trained:
    """A training that is done.

    Attributes:
        run: The run that has played its rounds.
        checkpoint: Its last checkpoint.
    """

    run: Run
    checkpoint: Path


class SharedTraining:
    """Which runs of a study train alike.

    The rounds of such runs are the same bit by bit: their configs differ in the section ``personalize`` alone, and
    clients are personalized after the last round.

    Args:
        runs: Runs of the study, whether they are done or not.
    """

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._groups: list[tuple[dict[str, Any], list[Run]]] = []
        for run in runs:
            options = training_options(run)
            group = next((runs for others, runs in self._groups if same_options(options, others)), None)
            if group is None:
                self._groups.append((options, [run]))
            else:
                group.append(run)

    def others(self, run: Run) -> list[Run]:
        """The other runs that train as a run does."""
        groups = [group for _, group in self._groups if any(one.folder == run.folder for one in group)]
        return [one for group in groups for one in group if one.folder != run.folder]

    def done_by(self, run: Run) -> Trained | None:
        """The training of another run that a run can go on after; ``None`` if there is none."""
        for other in self.others(run):
            checkpoint = last_checkpoint(other) if state_of(other) is RunState.DONE else None
            if checkpoint is not None:
                return Trained(other, checkpoint)
        return None

    def repeated(self, runs: Iterable[Run]) -> list[Run]:
        """The runs that others train for, if they are played in this order."""
        found: list[Run] = []
        before: list[Run] = []
        for run in runs:
            if last_checkpoint(run) is None and (self.is_active(run, before) or self.done_by(run) is not None):
                found.append(run)
            before.append(run)
        return found

    def is_active(self, run: Run, active: Iterable[Run]) -> bool:
        """Whether one of the runs that are played trains as a run does."""
        folders = {one.folder for one in active}
        return any(other.folder in folders for other in self.others(run))

    def is_elsewhere(self, run: Run) -> bool:
        """Whether another command on the same folder now trains as a run does."""
        return any(state_of(other) is not RunState.DONE and _is_locked(other) for other in self.others(run))


def keep_checkpoints(trained: Trained, run: Run) -> None:
    """Give a run the checkpoints of the training that it went on after, so that commands find them in its folder.

    They are links to the same files, which are replaced and never written to, or copies where a disk has no links.

    Args:
        trained: The training.
        run: The run, which is done and has written no checkpoint itself.
    """
    version = finished_folder(run)
    if version is None or last_checkpoint(run) is not None:
        return
    try:
        (version / "checkpoints").mkdir(exist_ok=True)
        for path in trained.checkpoint.parent.glob("*.ckpt"):
            _link(path, version / "checkpoints" / path.name)
    except OSError as error:  # such as a full disk
        warnings.warn(
            f"{run.name} has no checkpoints, as those of {trained.run.name} could not be copied to {version} "
            f"({error}); they are in {trained.checkpoint.parent}",
            stacklevel=2,
        )


def _link(path: Path, link: Path) -> None:
    try:
        os.link(path, link)
    except OSError:
        shutil.copyfile(path, link)


def training_options(run: Run) -> dict[str, Any]:
    """The options of a run that have an effect before its last round is played."""
    options = flat_options(run.config)
    return {path: value for path, value in options.items() if path.partition(".")[0] != AFTER_TRAINING}


def _is_locked(run: Run) -> bool:
    """Whether a study plays the run."""
    if not run.folder.is_dir():
        return False
    try:
        RunLock(run.folder).release()
    except RunLockedError:
        return True
    return False
