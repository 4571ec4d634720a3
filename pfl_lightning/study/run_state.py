"""How far a run is, by what lies in its folder, and which versions there are the study's."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pfl_lightning.errors import RunLockedError, UsageError
from pfl_lightning.runs.changes import OF_RUNS, Change, diff
from pfl_lightning.runs.config import SETTINGS, find_seeds, flatten, is_below, leaves, same_options
from pfl_lightning.runs.files import first_config, read_config, resumed_configs
from pfl_lightning.runs.files import last_checkpoint as checkpoint_of
from pfl_lightning.runs.folder import RunFolder
from pfl_lightning.runs.lock import RunLock
from pfl_lightning.study.definition.options import Config, as_read, read_yaml
from pfl_lightning.study.definition.plan import Run

__all__ = [
    *("Progress", "RunState", "changed_options", "changes_of", "copy_progress", "finished_folder"),
    *("flat_options", "is_in_use", "last_checkpoint", "others_versions", "own_versions", "read_progress", "state_of"),
    "unreadable_results",
]

MACHINE_OPTIONS = (
    *("run_dir", "data.init_args.root", "data.init_args.num_workers", "trainer.devices"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.logger"),
    *("trainer.default_root_dir", "trainer.log_every_n_steps", "trainer.profiler"),
)
"""Options that differ between machines and change no result."""

COMPARED = (*SETTINGS, "trainer.max_epochs", "seed_everything", "model.seed")
"""Options by which versions are told apart."""

NO_RESULT = ("checkpoint", "inspect", "results")
"""Options outside of the Trainer that change no result."""


NOT_GIVEN = "not given"
"""Value of an option that a config does not have, which null need not be the same as."""


class RunState(Enum):
    """How far a run is."""

    DONE = "done"
    UNFINISHED = "unfinished"
    NEW = "new"
    CHANGED = "changed"


def state_of(run: Run) -> RunState:
    """How far a run is: changed, if something of it is there that another config has left."""
    if changes_of(run):
        return RunState.CHANGED
    if finished_folder(run) is not None:
        return RunState.DONE
    return RunState.UNFINISHED if RunFolder(run.folder).versions() else RunState.NEW


def changes_of(run: Run) -> list[Change]:
    """Options in which what is there of a run was made otherwise; none where nothing is there."""
    return changed_options(run) if RunFolder(run.folder).versions() else []


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


def flat_options(config: Config) -> dict[str, Any]:
    """The options of a config by path, without those that change no result."""
    return {path: value for path, value in leaves(config).items() if not is_below(path, *MACHINE_OPTIONS)}


def finished_folder(run: Run) -> Path | None:
    """The folder with the results of a finished run; ``None`` while there is none.

    Results that cannot be read, such as those of a damaged disk, are none: the run goes on after its last checkpoint,
    and writes them again. Versions that somebody has made with other options are not the study's.
    """
    needed = ["personalized.json"] if personalizes(run.config) else []
    for version in reversed(own_versions(run)):
        finished = (_content(version / "results.json") or {}).get("finished") is True
        if finished and all(_content(version / name) is not None for name in needed):
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
    paths = map(checkpoint_of, reversed(own_versions(run)))
    return next((path for path in paths if path.is_file()), None)


def is_in_use(run: Run) -> bool:
    """Whether a process trains the run, such as one that a killed study has left."""
    for version in RunFolder(run.folder).versions():
        try:
            RunLock(version).release()
        except RunLockedError:
            return True
    return False


# ---------------------------------------------------------------------- versions that somebody has made by hand


def own_versions(run: Run) -> list[Path]:
    """The versions that count as the run, the oldest first.

    One that was made with the run's options does, by the study's command or by hand; not one of other options, nor one
    that went on with other options.
    """
    wanted = as_read(run.config)
    configs = {version: _configs(version) for version in RunFolder(run.folder).versions()}
    made = [one[0] for one in configs.values() if one and _is_of_a_study(one[0]) and _agree(wanted, one[0])]

    def is_own(config: Config, first: Config) -> bool:
        same = _is_of_a_study(config) or not _differs(made[0] if made else first, config)
        return same and _agree(wanted, config)

    return [version for version, found in configs.items() if all(is_own(one, found[0]) for one in found)]


def others_versions(run: Run) -> list[Path]:
    """The versions that do not count."""
    own = own_versions(run)
    return [version for version in RunFolder(run.folder).versions() if version not in own]


def _configs(version: Path) -> list[Config]:
    """What a version began with and was resumed with, but for files that cannot be read."""
    paths = (first_config(version), *resumed_configs(version))
    return [config for path in paths if (config := read_config(path))]


def _is_of_a_study(config: Mapping[str, Any]) -> bool:
    """Whether it has the callback that tells a study how far it is; so has what is made of such a config by hand."""
    trainer = config.get("trainer")
    callbacks = trainer.get("callbacks") if isinstance(trainer, Mapping) else None
    found = callbacks if isinstance(callbacks, list) else []
    return any(str(one.get("class_path", "")).endswith("ProgressFile") for one in found if isinstance(one, Mapping))


def _differs(studys: Config, other: Config) -> bool:
    """Whether a version was made with other options than the study's; some may be such as the study leaves alone."""
    changes = (one for one in diff(studys, other, OF_RUNS) if not one.of_execution)
    found = [one for one in changes if not is_below(one.option, *NO_RESULT)]
    compared = [one for one in found if not is_below(one.option, "trainer") or is_below(one.option, *COMPARED)]
    return any(one.known for one in compared) or any(one.of_an_engine for one in found)


def _agree(mine: Config, theirs: Config) -> bool:
    """Whether two configs, of which the second has all defaults, too, have the same numbers where both have them."""
    one, two = dict(_numbers(mine)), dict(_numbers(theirs))
    # A rate of 1 is saved as 1.0.
    return all(one[path] == two[path] or one[path] != one[path] for path in one.keys() & two.keys())


def _numbers(config: Config) -> Iterator[tuple[str, Any]]:
    """Numbers and switches by path, seeds, and the method's name: names of other classes may be written in two ways."""
    for name in COMPARED:
        value: Any = config
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        for path, found in flatten(name, value).items():
            if isinstance(found, int | float) or (path == "model.method" and isinstance(found, str)):
                yield path, found
    seeds = find_seeds(config.get("data"))
    yield from ((f"seed {place} of {len(seeds)}", seed) for place, seed in enumerate(seeds))


# ---------------------------------------------------------------------- while it runs


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


def copy_progress(trained: Run, run: Run) -> None:
    """Let a run be as far as another one, whose training it goes on after.

    Args:
        trained: The other run.
        run: The run.
    """
    with suppress(OSError):  # without it, accuracy and time left are not shown while the study runs
        shutil.copyfile(trained.progress_file, run.progress_file)
