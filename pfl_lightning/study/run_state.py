"""How far a run is, by what lies in its folder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pfl_lightning.cli.config_files import read_yaml
from pfl_lightning.errors import RunLockedError, UsageError
from pfl_lightning.runs.changes import OF_RUNS, Change, diff, listed_some
from pfl_lightning.runs.config import SETTINGS, is_below, leaves, same_options
from pfl_lightning.runs.files import CONFIG, read_config, resumed_configs
from pfl_lightning.runs.files import last_checkpoint as checkpoint_of
from pfl_lightning.runs.folder import RunFolder
from pfl_lightning.runs.lock import RunLock
from pfl_lightning.study.options import Config, as_read, short_path
from pfl_lightning.study.plan import Run

__all__ = [
    *("PROGRESS_FILE", "Progress", "RunState", "changed_options", "claim", "damaged_results", "difference"),
    *("finished_folder", "flat_options", "is_in_use", "last_checkpoint", "read_progress", "state_of", "version_of"),
]

PROGRESS_FILE = "pfl_lightning.study.callbacks.ProgressFile"
"""The callback that a study gives its runs, by which they are known."""

MACHINE_OPTIONS = (
    *("run_dir", "data.init_args.root", "data.init_args.num_workers", "trainer.devices"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.logger"),
    *("trainer.default_root_dir", "trainer.log_every_n_steps", "trainer.profiler"),
)
"""Options that differ between machines and change no result."""

COMPARED = (*SETTINGS, "trainer.max_epochs", "seed_everything", "model")
"""Options that must be equal where a run was resumed."""

NOT_GIVEN = "not given"
"""Value of an option that a config does not have, which null need not be the same as."""


class RunState(Enum):
    """How far a run is."""

    DONE = "done"
    UNFINISHED = "unfinished"
    NEW = "new"
    CHANGED = "changed"
    WAITING = "to search"


def state_of(run: Run) -> RunState:
    """How far a run is: changed, if something of it is there that another config has left."""
    if difference(run):
        return RunState.CHANGED
    if run.cell.waits:
        return RunState.WAITING
    if finished_folder(run) is not None:
        return RunState.DONE
    return RunState.NEW if version_of(run) is None else RunState.UNFINISHED


def version_of(run: Run) -> Path | None:
    """The version that is the run: the first one that a study has begun. Others somebody has made by hand.

    Of one whose process was killed early there may be no config.
    """
    versions = RunFolder(run.folder).versions()
    configs = {version: version / CONFIG for version in versions}
    ours = (v for v, path in configs.items() if not path.is_file() or PROGRESS_FILE in path.read_text(errors="replace"))
    return next(ours, None)


def difference(run: Run) -> str:
    """In which options what is there of a run was made otherwise; empty where nothing is there."""
    version = version_of(run)
    if version is None:
        return ""
    found = [*changed_options(run), *_resumed_with(version)]
    if not run.cell.waits:
        return listed_some(found)
    searched = [short_path(path) for path in run.cell.search.space] if run.cell.search is not None else []
    others = [change for change in found if not is_below(short_path(change.option), *searched)]
    return listed_some(others) or "what another search has found"


def changed_options(run: Run) -> list[Change]:
    """Options whose values differ from those that the run's file of its config has.

    The value of an option that is in one of the configs alone is ``NOT_GIVEN`` in the other.
    """
    if not run.config_file.is_file():
        return []
    try:
        written = read_yaml(run.config_file) or {}
    except UsageError as error:
        warnings.warn(
            f"{error}; the run counts as one of this study's options, and the file is written again when it goes on. "
            "If it may have had others, remove the run's folder",
            stacklevel=2,
        )
        return []
    before, now = flat_options(written), flat_options(run.config)
    if not same_options(before, now):
        now = flat_options(as_read(run.config))  # as the file has it: a text such as 1e5 is a number there
    return diff(before, now, missing=NOT_GIVEN)


def _resumed_with(version: Path) -> list[Change]:
    """Options with which somebody went on with a run by hand, and which change its results."""
    resumed = resumed_configs(version)
    first = read_config(version / CONFIG) if resumed else {}
    found = [
        change
        for path in resumed
        for change in diff(first, read_config(path) or first, OF_RUNS)
        if not change.of_execution
        and is_below(change.option, *COMPARED)
        and not is_below(change.option, *MACHINE_OPTIONS)
    ]
    return [change for change in found if change.known or change.of_an_engine]


def flat_options(config: Config) -> dict[str, Any]:
    """The options of a config by path, without those that change no result."""
    return {path: value for path, value in leaves(config).items() if not is_below(path, *MACHINE_OPTIONS)}


# ---------------------------------------------------------------------- what a run has left


def finished_folder(run: Run) -> Path | None:
    """The folder with the results of a finished run; ``None`` while there is none.

    Results that cannot be read, such as those of a damaged disk, are none: the run goes on after its last checkpoint,
    and writes them again.
    """
    version = version_of(run)
    if version is None:
        return None
    found = [_content(version / name) for name in _results(run)]
    finished = None not in found and (found[0] or {}).get("finished") is True
    return version if finished else None


def damaged_results(run: Run) -> Path | None:
    """A file of results that is there and cannot be read; ``None`` if there is none."""
    version = version_of(run)
    paths = [version / name for name in _results(run)] if version is not None else []
    return next((path for path in paths if path.is_file() and _content(path) is None), None)


def _results(run: Run) -> list[str]:
    """Files that a finished run has."""
    return ["results.json"] + ["personalized.json"] * (run.config.get("personalize") not in (None, False))


def _content(path: Path) -> Mapping[str, Any] | None:
    """The content of a file of results; ``None`` if it is not there, or is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # no JSON, no text
        return None
    return found if isinstance(found, Mapping) else None


def last_checkpoint(run: Run) -> Path | None:
    """The checkpoint that a run goes on from."""
    version = version_of(run)
    return checkpoint_of(version) if version is not None and checkpoint_of(version).is_file() else None


# ---------------------------------------------------------------------- while it runs


def is_in_use(run: Run) -> bool:
    """Whether a process trains the run, such as one that a killed study has left."""
    for version in RunFolder(run.folder).versions():
        try:
            RunLock(version).release()
        except RunLockedError:
            return True
    return False


def claim(run: Run) -> RunLock | None:
    """The lock of a run; ``None`` while another process has it, such as one that a killed study has left."""
    run.folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = RunLock(run.folder)
    except RunLockedError:
        return None
    if is_in_use(run):
        lock.release()
        return None
    return lock


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        round: Rounds played, those before a resume included.
        rounds: Rounds in all.
        seconds_per_round: Mean over the rounds of this process, evaluations included.
        test: Mean test accuracy of the last evaluated round, in [0, 1].
        validation: Mean validation accuracy of the last evaluated round.
        best_validation: The highest mean validation accuracy of a round, those before a resume included.
        score: What was evaluated: ``"classifier"``, ``"nearest_neighbor"`` or ``"metric"``.
    """

    round: int
    rounds: int
    seconds_per_round: float
    test: float | None = None
    validation: float | None = None
    best_validation: float | None = None
    score: str = "classifier"


def read_progress(path: Path) -> Progress | None:
    """What a run wrote last; ``None`` before its first round."""
    try:
        return Progress(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
