"""Which versions in a run's folder are the study's: others may have been made by hand with the run's config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pfl_lightning.runs.changes import Change, Scope, diff
from pfl_lightning.runs.config import SETTINGS, find_seeds, flatten, is_below
from pfl_lightning.runs.files import first_config, read_config, resumed_configs
from pfl_lightning.runs.folder import RunFolder
from pfl_lightning.study.definition.options import Config
from pfl_lightning.study.definition.plan import Run
from pfl_lightning.study.definition.yaml_file import as_read

__all__ = ["others_versions", "own_versions"]

NO_RESULT = (
    *("trainer.callbacks", "trainer.logger", "trainer.devices", "trainer.default_root_dir"),
    *("checkpoint", "inspect", "results"),
)
"""Options that a study's command has, or that change no result."""

COMPARED = (*SETTINGS, "trainer.max_epochs", "seed_everything", "model.seed")


def own_versions(run: Run) -> list[Path]:
    """The versions that count as the run, the oldest first.

    One that was made with the run's options does, by the study's command or by hand; not one of other options, nor one
    that went on with other options.
    """
    return [version for version in RunFolder(run.folder).versions() if _is_own(run, version)]


def others_versions(run: Run) -> list[Path]:
    """The versions that do not count."""
    own = own_versions(run)
    return [version for version in RunFolder(run.folder).versions() if version not in own]


def _is_own(run: Run, version: Path) -> bool:
    before = read_config(first_config(version))
    wanted = as_read(run.config)
    if before and not _agree(wanted, before):
        return False
    if before and not _is_of_a_study(before) and _differs(_studys_config(run, wanted), before):
        return False
    for path in resumed_configs(version):
        now = read_config(path)
        by_the_study = _is_of_a_study(now) and _agree(wanted, now)
        if now and not by_the_study and any(_makes_a_result(one) for one in diff(before, now, Scope.RUN)):
            return False
        before = now or before
    return True


def _is_of_a_study(config: Mapping[str, Any]) -> bool:
    """Whether it has the callback that tells a study how far it is; so has what is made of such a config by hand."""
    trainer = config.get("trainer")
    callbacks = trainer.get("callbacks") if isinstance(trainer, Mapping) else None
    found = callbacks if isinstance(callbacks, list) else []
    return any(str(one.get("class_path", "")).endswith("ProgressFile") for one in found if isinstance(one, Mapping))


def _studys_config(run: Run, wanted: Config) -> Config:
    """The config of the first version that the study has made, with all defaults; empty if there is none."""
    configs = (read_config(first_config(version)) for version in RunFolder(run.folder).versions())
    return next((config for config in configs if _is_of_a_study(config) and _agree(wanted, config)), {})


def _differs(studys: Config, other: Config) -> bool:
    """Whether a version was made with other options than the study's; some may be such as the study leaves alone."""
    found = diff(studys, other, Scope.RUN) if studys else []
    return any(one.of_an_engine or (one.known and _is_compared(one.option) and _makes_a_result(one)) for one in found)


def _is_compared(option: str) -> bool:
    """Whether an option is none of the Trainer's that change no result, such as a progress bar."""
    return not option.startswith("trainer.") or is_below(option, *COMPARED)


def _makes_a_result(change: Change) -> bool:
    return not change.of_execution and not is_below(change.option, *NO_RESULT)


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
