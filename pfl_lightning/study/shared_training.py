"""Runs that train alike and differ in what clients do afterwards: one of them trains, the others go on after it."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_lightning.runs.config import is_below, leaves, same_options
from pfl_lightning.runs.files import last_checkpoint as checkpoint_of
from pfl_lightning.state.files import replace_file
from pfl_lightning.study.definition.options import option_of
from pfl_lightning.study.definition.plan import Run
from pfl_lightning.study.run_state import finished_folder, last_checkpoint

__all__ = ["SharedTraining", "Trained", "settle"]

POST_TRAINING_OPTIONS = ("personalize", "run_dir")
"""Options that change nothing before a run's last round."""


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

    The rounds of such runs are the same bit for bit: their configs differ in the section ``personalize`` alone, and
    clients are personalized after the last round. A training is shared only by the command that has begun it: until
    another one is given, the data or a project's own code may have changed.

    Args:
        runs: Runs of the study, whether they are done or not.
    """

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._begun: set[Path] = set()  # folders of runs that were started from their first round
        self._alike: dict[Path, list[Run]] = {}  # by the folder of a run, those that train as it does
        groups: list[tuple[dict[str, Any], list[Run]]] = []
        for run in runs:
            if run.rounds and option_of(run.config, "trainer.enable_checkpointing", True) is not False:
                options = training_options(run)
                group = next((group for others, group in groups if same_options(options, others)), None)
                if group is None:
                    groups.append((options, group := []))
                group.append(run)
                self._alike[run.folder] = group

    def others(self, run: Run) -> list[Run]:
        """The other runs that train as a run does."""
        return [one for one in self._alike.get(run.folder, ()) if one.folder != run.folder]

    def begin(self, run: Run) -> None:
        """Note that a run is started from its first round."""
        self._begun.add(run.folder)

    def give_up(self, run: Run) -> None:
        """Note that a run could not go on after another one's training: it trains itself."""
        self._alike.pop(run.folder, None)

    def done_by(self, run: Run) -> Trained | None:
        """The training of another run that a run, which has not begun, goes on after; ``None`` if there is none."""
        return next((found for other in self._begun_by_others(run) if (found := _training_of(other)) is not None), None)

    def must_wait(self, run: Run, active: Iterable[Run]) -> bool:
        """Whether a run waits for one that is under way, since it can go on after that one's training."""
        begun, played = self._begun_by_others(run), {one.folder for one in active}
        ended = any(finished_folder(other) is not None for other in begun)  # if of no use, the others would not be
        return not ended and any(other.folder in played for other in begun)

    def _begun_by_others(self, run: Run) -> list[Run]:
        """Runs of this command after whose training a run could go on, which has not begun itself."""
        return [] if last_checkpoint(run) else [one for one in self.others(run) if one.folder in self._begun]

    def repeated(self, runs: Iterable[Run]) -> list[Run]:
        """The runs that others train for, if they are started in this order."""
        found: list[Run] = []
        before: set[Path] = set()
        for run in runs:
            if last_checkpoint(run) is None:
                found += [run] if any(other.folder in before for other in self.others(run)) else []
                before.add(run.folder)
        return found


def training_options(run: Run) -> dict[str, Any]:
    """The options of a run that have an effect before its last round, places of data among them."""
    return {path: value for path, value in leaves(run.config).items() if not is_below(path, *POST_TRAINING_OPTIONS)}


def _training_of(run: Run) -> Trained | None:
    """A run's training, if it has played all its rounds and has left its last checkpoint.

    One that a callback has ended before is not shared: the callback would not end the others again.
    """
    version = finished_folder(run)
    if version is None or not checkpoint_of(version).is_file():
        return None
    played = json.loads((version / "results.json").read_text()).get("rounds")
    return Trained(run, checkpoint_of(version)) if played == run.rounds else None


def settle(trained: Trained, run: Run) -> None:
    """Leave in a run's folder what it would have left had it trained itself: checkpoints, and a config that trains.

    The checkpoints are links to the same files, which are replaced and never written to, or copies where a disk has no
    links.

    Args:
        trained: The training that the run went on after.
        run: The run, which is done and has written no checkpoint itself.
    """
    version = finished_folder(run)
    if version is None or last_checkpoint(run) is not None:
        return
    try:
        (version / "checkpoints").mkdir(exist_ok=True)
        for path in trained.checkpoint.parent.glob("*.ckpt"):
            _link(path, version / "checkpoints" / path.name)
        _without_checkpoint(version / "config.yaml")
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


def _without_checkpoint(config: Path) -> None:
    """Let a config begin at the first round; a long path goes on over indented lines."""
    if config.is_file():
        text = re.sub(r"^ckpt_path:.*(\n[ \t]+.*)*", "ckpt_path: null", config.read_text(), flags=re.MULTILINE)
        with replace_file(config) as temporary:
            temporary.write_text(text)
