"""What differs between two configs: the one comparison, which run is meant, and what a resumption has changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.runs.config import PLACES, SETTINGS, apart, changes_training, is_below, leaves, option_of
from pfl_lightning.runs.files import CHANGES, CONFIG, damaged, newest_config, read_config, read_json
from pfl_lightning.state.files import replace_file

OF_RUNS = ("seed_everything", "model", "data", "loop", "personalize", "trainer", "inspect", "results", "checkpoint")
"""Options that make a run; the others say what a command does with it."""

CORE = ("seed_everything", "model", "data", "loop")
"""Those without which it is another run."""

OF_MODELS = ("seed_everything", "model", "data")
"""Those that an evaluation depends on."""

ROOT = "data.init_args.root"
"""The folder of the data."""

EXECUTION = ("model.engine", "model.client_state_memory_gb", "model.spill_dir", "model.metrics", ROOT)
"""Options that say how and where a run is computed, and what else is measured, but for those of an engine that change
the training."""

DATA = "data.fingerprint"
"""What a resumption on other data has changed beside options."""

SHOWN = 6
"""Changes that a sentence names; the file has all."""


@dataclass(frozen=True)
class Change:
    """An option that has another value.

    Attributes:
        option: Its path, such as ``trainer.max_epochs``.
        before: Its value in the run so far; ``None`` where it was not there.
        now: Its value now.
        known: Whether both configs know the option, or one above or below it, such as ``null`` in place of a class.
            Otherwise another version of the package may have added it.
    """

    option: str
    before: Any
    now: Any
    known: bool = True

    @property
    def of_an_engine(self) -> bool:
        """Whether it is an option of an engine that changes the training."""
        return changes_training(self.option, self.before, self.now)

    @property
    def of_execution(self) -> bool:
        """Whether it says how or where a run is computed, and not what."""
        return not self.of_an_engine and is_below(self.option, *EXECUTION)

    @property
    def makes_another_result(self) -> bool:
        """Whether results under both values are of two settings."""
        setting = is_below(self.option, *SETTINGS) and self.option.rpartition(".")[2] not in PLACES
        return self.of_an_engine or (self.known and setting)

    def __str__(self) -> str:
        """Both values, shortened."""
        return f"{self.option}: {_short(self.before)} -> {_short(self.now)}"


def diff(
    before: Mapping[str, Any], now: Mapping[str, Any], among: Sequence[str] = (), missing: Any = None
) -> list[Change]:
    """Options that differ between two configs, in the order of the first, with those of the second alone behind it.

    Args:
        before: A config.
        now: Another one.
        among: First names of the options that are compared, such as :data:`OF_RUNS`; all if empty.
        missing: Value of an option that a config does not have; ``None`` for one that is as good as ``null``.

    Example:
        >>> [str(change) for change in diff({"trainer": {"max_epochs": 2}}, {"trainer": {"max_epochs": 3}})]
        ['trainer.max_epochs: 2 -> 3']
    """
    if among:
        before, now = ({name: config.get(name) for name in among} for config in (before, now))
    old, new = leaves(before), leaves(now)
    if missing is None:  # nothing is in an empty mapping, either
        old, new = ({path: value for path, value in one.items() if value != {}} for one in (old, new))
    return [
        Change(path, old.get(path, missing), new.get(path, missing), _knows(old, path) and _knows(new, path))
        for path in apart(old, new, missing)
    ]


def _knows(options: Mapping[str, Any], path: str) -> bool:
    """Whether a config has an option, one above it or one below it."""
    return any(is_below(path, one) or is_below(one, path) for one in options)


def distance(run: Path, config: Mapping[str, Any]) -> tuple[int, int, bool]:
    """How far a run's config is from another, most important first.

    Differing options that make it another run, those of the Trainer, and whether its data lies in another folder.
    Another engine and other places of files make no other run.
    The nearer one counts of the config that the run began with and the one that it was resumed with last.
    """
    found = []
    for path in {run / CONFIG, newest_config(run)}:
        changes = diff(read_config(path), config, OF_RUNS)
        what = [change.option for change in changes if not change.of_execution]
        core, trainer = (sum(is_below(option, *group) for option in what) for group in (CORE, ("trainer",)))
        found.append((core, trainer, any(change.option == ROOT for change in changes)))
    return min(found)


def evaluated_otherwise(run: Path, config: Mapping[str, Any]) -> list[Change]:
    """Options of a command that make another model or other data than the run's, whose checkpoint it evaluates.

    Args:
        run: The run's folder.
        config: The command's config.
    """
    saved = read_config(newest_config(run))
    found = diff(saved, config, OF_MODELS) if saved else []
    return [change for change in found if change.known and not change.of_execution]


def check_seed(run: Path, config: Mapping[str, Any]) -> None:
    """Refuse to resume a run under another seed.

    Raises:
        ConfigurationError: Names both seeds.
    """
    before, now = (_seed(options) for options in (read_config(run / CONFIG), config))
    if before is not None and now is not None and before != now:
        raise ConfigurationError(
            f"the run {run} has the seed {before}, but would resume with the seed {now}: a run has one seed. "
            f"Pass --seed_everything {before}, or start a new run (without --ckpt_path)"
        )


def _seed(config: Mapping[str, Any]) -> int | None:
    own = option_of(config, "model.seed")
    seed = config.get("seed_everything") if own is None else own
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def check_rounds_left(run: Path, before: Mapping[str, Any], now: Mapping[str, Any], rounds: int) -> None:
    """Refuse to resume a run with other settings where no round is left: its results would be told as theirs.

    Args:
        run: The run's folder.
        before: The config that it had before.
        now: The config that it resumes with.
        rounds: Its rounds, all of which are over.

    Raises:
        ConfigurationError: Names the settings.
    """
    changes = [change for change in diff(before, now, OF_RUNS) if not is_below(change.option, "personalize")]
    if found := [change for change in changes if change.makes_another_result]:
        raise ConfigurationError(
            f"the run {run} has no round left after its {rounds} rounds, and would be resumed with other settings: "
            f"{listed_some(found)}. To train with them from here on, pass --trainer.max_epochs above {rounds} (and "
            "leave out what ended it early, if anything did), or start a new run (without --ckpt_path)"
        )


def record_changes(
    run: Path, saved: Path, before: Mapping[str, Any], round: int, further: Sequence[Change] = ()
) -> list[Change]:
    """Write into ``changes.json`` of a run's folder what its resumption has changed, if anything.

    Args:
        run: The run's folder.
        saved: The config that it resumes with, as it was saved.
        before: The config that it had before.
        round: The next round, from 1.
        further: What has changed beside options.

    Raises:
        ConfigurationError: The file is damaged.
    """
    found = [*diff(before, read_config(saved), OF_RUNS), *further]
    if found:
        entry = {"config": saved.name, "from_round": round, "changes": [vars(change) for change in found]}
        text = json.dumps([*_entries(run), entry], indent=2, default=str)
        with replace_file(run / CHANGES) as temporary:
            temporary.write_text(text + "\n")
    return found


def listed_some(found: Sequence[object]) -> str:
    """The first of many changes, or of others, for a sentence, and how many more there are."""
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(map(str, found[:SHOWN])) + more


def _entries(run: Path) -> list[Any]:
    """What ``changes.json`` has: an entry for each resumption with other options."""
    path = run / CHANGES
    found = read_json(path) if path.is_file() else []
    if not isinstance(found, list):
        raise damaged(path, "it has no list")
    return found


def _recorded(run: Path) -> Iterator[tuple[Mapping[str, Any], Any, Any]]:
    """What resumptions have changed, from which round, and the name of the resumption's config."""
    for entry in _entries(run):
        changes = entry.get("changes") if isinstance(entry, Mapping) else None
        for change in changes if isinstance(changes, list) else ():
            if isinstance(change, Mapping):
                yield change, entry.get("from_round"), entry.get("config")


def resumed_with(folder: Path) -> dict[str, str]:
    """What resumptions of a run have changed, as options of it: from which round, and the values before and then.

    Rounds, the engine, seeds and places of files are none: they are compared otherwise, or change nothing. Nor is the
    personalization of a run that went on in a folder of its own: the one of its config alone was done.

    Args:
        folder: The run's folder, with ``changes.json`` if it was resumed with other options.
    """
    found: dict[str, list[str]] = {}
    for change, from_round, config in _recorded(folder):
        option, before, now = str(change.get("option")), change.get("before"), change.get("now")
        if config == CONFIG and is_below(option, "personalize"):
            continue
        # A later version of the package may have added an option; files of earlier ones do not say.
        known = change.get("known", before is not None and now is not None)
        if Change(option, before, now, known).makes_another_result:
            text = f"{_short(before)} -> {_short(now)} from round {from_round}"
            found.setdefault(f"resumed.{option.replace('.init_args', '')}", []).append(text)
    return {option: ", ".join(texts) for option, texts in found.items()}


def resumed_rounds(folder: Path) -> int | None:
    """The rounds that the last resumption has asked for; ``None`` if none has asked for other rounds.

    Args:
        folder: The run's folder.
    """
    asked = [change.get("now") for change, *_ in _recorded(folder) if change.get("option") == "trainer.max_epochs"]
    rounds = asked[-1] if asked else None
    return rounds if isinstance(rounds, int) and not isinstance(rounds, bool) else None


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
