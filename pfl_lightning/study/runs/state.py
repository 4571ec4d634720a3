"""How far a run is, by what lies in its folder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pfl_lightning.errors import RunLockedError, UsageError
from pfl_lightning.runs.changes import diff
from pfl_lightning.runs.config import is_below, leaves, same_options
from pfl_lightning.runs.folder import RunFolder
from pfl_lightning.runs.lock import RunLock
from pfl_lightning.study.definition.options import Config
from pfl_lightning.study.definition.plan import Run
from pfl_lightning.study.definition.yaml_file import as_read, read_yaml
from pfl_lightning.study.runs.versions import own_versions

__all__ = [
    "NOT_GIVEN",
    "RunState",
    "changed_options",
    "finished_folder",
    "flat_options",
    "is_in_use",
    "last_checkpoint",
    "state_of",
    "unreadable_results",
]

ELSEWHERE = (
    *("run_dir", "data.init_args.root", "data.init_args.num_workers", "trainer.devices"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.logger"),
    *("trainer.default_root_dir", "trainer.log_every_n_steps", "trainer.profiler"),
)
"""Options that differ between machines and change no result."""


class _NotGiven:
    def __str__(self) -> str:
        return "not given"


NOT_GIVEN = _NotGiven()
"""Value of an option that a config does not have, which null need not be the same as."""


class RunState(Enum):
    """How far a run is."""

    DONE = "done"
    UNFINISHED = "unfinished"
    NEW = "new"
    CHANGED = "changed"


def state_of(run: Run) -> RunState:
    """How far a run is: changed, if something of it is there that another config has left."""
    versions = RunFolder(run.folder).versions()
    if versions and changed_options(run):
        return RunState.CHANGED
    if finished_folder(run) is not None:
        return RunState.DONE
    return RunState.UNFINISHED if versions else RunState.NEW


def changed_options(run: Run) -> dict[str, tuple[Any, Any]]:
    """Options whose values differ from those that the run was started with: by path, the old and the new one.

    The value of an option that is in one of the configs alone is ``NOT_GIVEN`` in the other.
    """
    if not run.config_file.is_file():
        return {}
    try:
        written = read_yaml(run.config_file) or {}
    except UsageError as error:
        warnings.warn(
            f"{error}; the run counts as one of this study's options, and the file is written again when it goes on. "
            "If it may have had others, remove the run's folder",
            stacklevel=2,
        )
        return {}
    before, now = flat_options(written), flat_options(run.config)
    if not same_options(before, now):
        now = flat_options(as_read(run.config))  # as the file has it: a text such as 1e5 is a number there
    return {change.option: (change.before, change.now) for change in diff(before, now, missing=NOT_GIVEN)}


def flat_options(config: Config) -> dict[str, Any]:
    """The options of a config by path, without those that change no result."""
    return {path: value for path, value in leaves(config).items() if not is_below(path, *ELSEWHERE)}


def finished_folder(run: Run) -> Path | None:
    """The folder with the results of a finished run; ``None`` while there is none.

    Results that cannot be read, such as those of a damaged disk, are none: the run goes on after its last checkpoint,
    and writes them again. Versions that somebody has made with other options are not the study's.
    """
    needed = ["personalized.json"] if personalizes(run.config) else []
    for version in reversed(own_versions(run)):
        finished = (_content(version / "results.json") or {}).get("finished") is True
        whole = finished and all(_content(version / name) is not None for name in needed)
        if whole:
            return version
    return None


def unreadable_results(run: Run) -> Path | None:
    """A file of results that is there and cannot be read; ``None`` if there is none."""
    for version in reversed(RunFolder(run.folder).versions()):
        for path in (version / "results.json", version / "personalized.json"):
            if path.is_file() and _content(path) is None:
                return path
    return None


def personalizes(config: Config) -> bool:
    """Whether a run ends with a personalization."""
    return config.get("personalize") not in (None, False)


def _content(path: Path) -> Mapping[str, Any] | None:
    """The content of a file of results; ``None`` if it is not there, or is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # no JSON, no text
        return None
    return found if isinstance(found, Mapping) else None


def last_checkpoint(run: Run) -> Path | None:
    """The checkpoint that a run goes on from."""
    for version in reversed(own_versions(run)):
        if (version / "checkpoints" / "last.ckpt").is_file():
            return version / "checkpoints" / "last.ckpt"
    return None


def is_in_use(run: Run) -> bool:
    """Whether a process trains the run, such as one that a killed study has left."""
    for version in RunFolder(run.folder).versions():
        try:
            RunLock(version).release()
        except RunLockedError:
            return True
    return False
