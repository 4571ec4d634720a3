"""What differs between two configs of a run: which run is meant, and what a resumption changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.runs.config import PLACES, SETTINGS, changes_training, is_below
from pfl_lightning.runs.files import read_json
from pfl_lightning.state.files import replace_file

__all__ = [
    "DATA",
    "Change",
    "Distance",
    "changes",
    "check_seed",
    "distance",
    "evaluated_otherwise",
    "first_config",
    "in_words",
    "newest_config",
    "read_config",
    "record_changes",
    "resumed_configs",
    "resumed_rounds",
    "resumed_with",
    "says_how",
]

COMPARED = ("seed_everything", "model", "data", "loop", "personalize", "trainer", "inspect", "results", "checkpoint")
"""Options that make a run; the others say what a command does with it."""

CORE = ("seed_everything", "model", "data", "loop")
"""Those without which it is another run."""

ROOT = "data.init_args.root"
"""The folder of the data."""

OF_MODELS = ("seed_everything", "model", "data")
"""Those that an evaluation depends on."""

HOW = ("model.engine", "model.client_state_memory_gb", "model.spill_dir", ROOT)
"""Options among them that say how and where a run is computed, but for those of an engine that change the training."""

DATA = "data.fingerprint"
"""What a resumption on other data has changed beside options."""

CHANGES = "changes.json"
SHOWN = 6
"""Options that a sentence names; the file has all."""

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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

    def __str__(self) -> str:
        """Both values, shortened."""
        texts = (json.dumps(value, default=str) for value in (self.before, self.now))
        before, now = (text if len(text) <= 60 else f"{text[:57]}..." for text in texts)
        return f"{self.option}: {before} -> {now}"


def read_config(path: Path) -> dict[str, Any]:
    """The options in a saved config; empty if it cannot be read."""
    try:
        found = yaml.load(path.read_text(), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def first_config(run: Path) -> Path:
    """The config that a run began with."""
    return run / "config.yaml"


def newest_config(run: Path) -> Path:
    """The config that a run was resumed with last, or else that it began with."""
    return [first_config(run), *resumed_configs(run)][-1]


def resumed_configs(run: Path) -> list[Path]:
    """The configs that a run was resumed with, the first one first."""
    found: list[Path] = []
    while (path := run / f"config-resumed-{len(found) + 1}.yaml").is_file():
        found.append(path)
    return found


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Options that make a run and differ, in the order of the config."""
    old, new = ({name: config.get(name) for name in COMPARED} for config in (before, now))
    values, others = dict(_flat(new, "")), dict(_flat(old, ""))
    names = list(dict.fromkeys([*values, *others]))
    different = (name for name in names if others.get(name) != values.get(name))
    return [
        Change(name, others.get(name), values.get(name), _knows(others, name) and _knows(values, name))
        for name in different
    ]


def _knows(options: Mapping[str, Any], name: str) -> bool:
    """Whether a config has an option, one above it or one below it."""
    above = (name.rsplit(".", number)[0] for number in range(name.count(".") + 1))
    return any(one in options for one in above) or any(one.startswith(f"{name}.") for one in options)


def _flat(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, entry in value.items() for pair in _flat(entry, f"{path}.{key}" if path else str(key))]
    return [(path, value)]


@dataclass(frozen=True, order=True)
class Distance:
    """How far a run's config is from another, most important first.

    Attributes:
        core: Differing options without which it is another run.
        trainer: Those of the Trainer.
        root: Whether the data lies in another folder: moved, or other data.
    """

    core: int = 0
    trainer: int = 0
    root: bool = False

    @property
    def makes_another_run(self) -> bool:
        """Whether more than the place of the data differs."""
        return (self.core, self.trainer) != (0, 0)


def distance(run: Path, config: Mapping[str, Any]) -> Distance:
    """How far a run's config is from another.

    Another engine and other places of files make no other run; of runs that are as near, one whose data lies in the
    same folder is nearer.
    The nearer one counts of the config that the run began with and the one that it was resumed with last.
    """
    found = []
    for path in {first_config(run), newest_config(run)}:
        saved = read_config(path)
        all_changes = changes(saved, config)
        different = [change.option.split(".")[0] for change in all_changes if not says_how(change)]
        core = sum(group in CORE for group in different)
        root = any(change.option == ROOT for change in all_changes)
        found.append(Distance(core, different.count("trainer"), root) if saved else Distance(10**6))
    return min(found)


def says_how(change: Change) -> bool:
    """Whether an option says how or where a run is computed, and not what."""
    if changes_training(change.option, change.before, change.now):
        return False
    return any(change.option == name or change.option.startswith(f"{name}.") for name in HOW)


def evaluated_otherwise(run: Path, config: Mapping[str, Any]) -> list[Change]:
    """Options of a command that make another model or other data than the run's, whose checkpoint it evaluates.

    Args:
        run: The run's folder.
        config: The command's config.
    """
    saved = read_config(newest_config(run))
    found = changes(saved, config) if saved else []
    return [c for c in found if c.known and c.option.split(".")[0] in OF_MODELS and not says_how(c)]


def check_seed(run: Path, config: Mapping[str, Any]) -> None:
    """Refuse to go on with a run under another seed.

    Raises:
        ConfigurationError: Names both seeds.
    """
    before, now = (_seed(options) for options in (read_config(first_config(run)), config))
    if before is not None and now is not None and before != now:
        raise ConfigurationError(
            f"the run {run} has the seed {before}, and it is to go on with the seed {now}: a run has one seed. Give "
            f"--seed_everything {before}, or start a run of its own (without --ckpt_path)"
        )


def _seed(config: Mapping[str, Any]) -> int | None:
    model = config.get("model")
    own = model.get("seed") if isinstance(model, dict) else None
    seed = config.get("seed_everything") if own is None else own
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def record_changes(
    run: Path, saved: Path, before: Mapping[str, Any], round: int, further: Sequence[Change] = ()
) -> list[Change]:
    """Write into ``changes.json`` of a run's folder what its resumption has changed, if anything.

    Args:
        run: The run's folder.
        saved: The config that it goes on with, as it was saved.
        before: The config that it had before.
        round: The next round, from 1.
        further: What has changed beside options.

    Raises:
        ConfigurationError: The file is damaged.
    """
    found = [*changes(before, read_config(saved)), *further]
    if found:
        path = run / CHANGES
        known = _known_changes(path)
        known.append({"config": saved.name, "from_round": round, "changes": [vars(change) for change in found]})
        with replace_file(path) as temporary:
            temporary.write_text(json.dumps(known, indent=2, default=str) + "\n")
    return found


def _known_changes(path: Path) -> list[Any]:
    """The entries of an earlier ``changes.json``, if there is one."""
    try:
        known = json.loads(path.read_text()) if path.is_file() else []
    except ValueError:  # of JSON or of UTF-8
        known = None
    if not isinstance(known, list):
        raise ConfigurationError(f"{path} is damaged: expected a list in JSON. Move it away, and resume the run again")
    return known


def in_words(found: list[Change]) -> str:
    """Changes in a sentence."""
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(map(str, found[:SHOWN])) + more


FIRST_CONFIG = "config.yaml"
"""The config that a run began with in its folder."""


def resumed_with(folder: Path) -> dict[str, str]:
    """What resumptions of a run have changed, as options of it: from which round, and the values before and then.

    Rounds, the engine, seeds and places of files are none: they are compared otherwise, or change nothing. Nor is the
    personalization of a run that went on in a folder of its own: the one of its config alone was done.

    Args:
        folder: The run's folder, with ``changes.json`` if it was resumed with other options.
    """
    found: dict[str, list[str]] = {}
    for change, from_round, config in _changes(folder):
        option, before, now = str(change.get("option")), change.get("before"), change.get("now")
        if config == FIRST_CONFIG and is_below(option, "personalize"):
            continue
        # A later version of the package may have added an option; files of earlier ones do not say.
        known = change.get("known", before is not None and now is not None)
        if changes_training(option, before, now) or (known and _makes_a_result(option)):
            text = f"{_short(before)} -> {_short(now)} from round {from_round}"
            found.setdefault(f"resumed.{option.replace('.init_args', '')}", []).append(text)
    return {option: ", ".join(texts) for option, texts in found.items()}


def resumed_rounds(folder: Path) -> int | None:
    """The rounds that the last resumption has asked for; ``None`` if none has asked for other rounds.

    Args:
        folder: The run's folder.
    """
    asked = [change.get("now") for change, *_ in _changes(folder) if change.get("option") == "trainer.max_epochs"]
    rounds = asked[-1] if asked else None
    return rounds if isinstance(rounds, int) and not isinstance(rounds, bool) else None


def _changes(folder: Path) -> Iterator[tuple[Mapping[str, Any], Any, Any]]:
    """What resumptions have changed, from which round, and the name of the resumption's config."""
    path = folder / "changes.json"
    entries = read_json(path, "what it was resumed with") if path.is_file() else ()
    for entry in entries if isinstance(entries, list) else ():
        changes = entry.get("changes") if isinstance(entry, Mapping) else None
        for change in changes if isinstance(changes, list) else ():
            if isinstance(change, Mapping):
                yield change, entry.get("from_round"), entry.get("config")


def _makes_a_result(option: str) -> bool:
    if option.rpartition(".")[2] in PLACES:
        return False
    return any(option == name or option.startswith(f"{name}.") for name in SETTINGS)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
