"""Reader of study files: what each key may hold. Every error names its place, what was expected, and what came."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pfl_lightning.cli.config_files import read_yaml
from pfl_lightning.errors import UsageError
from pfl_lightning.names import did_you_mean
from pfl_lightning.runs.config import equal
from pfl_lightning.study.definition import CHOICES, FIGURES, Dimension, Published, Search, Study
from pfl_lightning.study.options import Config, short_path

__all__ = ["read_study"]

Layers = Mapping[str, tuple[Config, ...]]
"""Configs by the name of a method or a setting; later ones win."""


@dataclass(frozen=True)
class Entry:
    """A value in a study file. Its readers raise a UsageError that names the place where the value is another.

    Attributes:
        place: Where it stands, such as ``study.yaml: grid.lr``.
        value: What stands there.
        folder: Folder of the study file, which paths are relative to.
    """

    place: str
    value: Any
    folder: Path

    def at(self, key: object, value: Any) -> Entry:
        """The entry of a key."""
        separator = ": " if self.place.endswith((".yaml", ".yml")) else "."
        return Entry(f"{self.place}{separator}{key}", value, self.folder)

    def error(self, expected: str) -> UsageError:
        """The error that something else was expected here."""
        text = repr(self.value)
        return UsageError(f"{self.place}: expected {expected}, got {text[:80]}{' ...' * (len(text) > 80)}")

    def of(self, kind: Any, expected: str, fits: Callable[[Any], bool] = lambda value: True) -> Any:
        """The value, which is of a kind and fits; true is no number."""
        of_kind = isinstance(self.value, kind) and isinstance(self.value, bool) is (kind is bool)
        if not of_kind or not fits(self.value):
            raise self.error(expected)
        return self.value

    def number(self, expected: str = "a number", fits: Callable[[Any], bool] = math.isfinite) -> float:
        """A whole number or a fraction, not NaN nor infinite."""
        found: float = self.of(int | float, expected, fits)
        return found

    def integer(self, at_least: int = 0, below: float = math.inf) -> int:
        """A whole number."""
        limits = f"of at least {at_least}{'' if math.isinf(below) else f' and below {below}'}"
        return int(self.of(int, f"a whole number {limits}", lambda value: at_least <= value < below))

    def one_of(self, choices: tuple[str, ...]) -> str:
        """One of some words."""
        if self.value not in choices:
            raise self.error(f"one of {', '.join(choices)}{did_you_mean(str(self.value), choices)}")
        return str(self.value)

    def mapping(self, known: Iterable[str] | None = None, expected: str = "a mapping") -> dict[str, Entry]:
        """Entries by key; of a mapping whose keys are known, no others."""
        entries: dict[str, Entry] = {}
        for key, value in self.of(Mapping, expected).items():
            if str(key) in entries:  # such as 1 and "1"
                raise UsageError(f"{self.place}: the name {str(key)!r} is given twice: keep one of them")
            if known is not None and key not in known:
                near = did_you_mean(str(key), known)
                raise UsageError(f"{self.place}: unknown key {str(key)!r}{near} (known are {', '.join(known)})")
            entries[str(key)] = self.at(key, value)
        return entries

    def options(self, expected: str) -> dict[str, Entry]:
        """Entries by path of option; one that stands there with and without ``init_args`` is refused."""
        entries, seen = self.mapping(expected=expected), dict[str, str]()
        for path in entries:
            if not path.strip("."):
                raise self.error(expected)
            if (other := seen.setdefault(short_path(path), path)) != path:
                raise UsageError(f"{self.place}: {other} and {path} are one option: keep one of them")
        return entries

    def list_of(self, what: str, read: Callable[[Entry], Any]) -> tuple[Any, ...]:
        """Different values of a list that is not empty."""
        values = self.of(list, f"a list of {what}", bool)
        found = tuple(read(self.at(number, value)) for number, value in enumerate(values))
        if any(equal(one, other) for number, one in enumerate(found) for other in found[:number]):
            raise self.error(f"different {what}")
        return found

    def names(self) -> tuple[str, ...]:
        """A list of different names."""
        return self.list_of("names", lambda one: one.of(str, "a text"))

    def values(self) -> tuple[Any, ...]:
        """A list of different values of an option; 1 and 1.0 are two, such as of clients and their share."""
        return self.list_of("values", lambda one: one.value)

    def config(self) -> Config:
        """A config: a mapping, or the path of a file, relative to the study file."""
        content = {} if self.value is None else self.value
        if isinstance(content, str):
            content = read_yaml(self.folder / content, self.place)
        # Keys of a class, without a word on what the class is.
        if not isinstance(content, Mapping) or {"class_path", "init_args"} & {*content}:
            raise self.error(
                "a config with keys such as model, data and trainer, as in {model: {method: {class_path: FedAvg}}}, or "
                "the path of a YAML file of one"
            )
        return dict(content)

    def configs(self) -> tuple[Config, ...]:
        """A config, or a list of some."""
        if not isinstance(self.value, list):
            return (self.config(),)
        return tuple(self.at(number, one).config() for number, one in enumerate(self.value))


def read_study(path: str | Path, scale: str = "") -> Study:
    """Read a study file.

    Args:
        path: The file.
        scale: Name of one of its scales; "" for the study as it stands.

    Raises:
        UsageError: What is wrong, with its place in the file.
    """
    path = Path(path)
    content = Entry(str(path), read_yaml(path), path.parent)
    if isinstance(content.value, dict) and {"model", "data"} <= content.value.keys():
        raise UsageError(
            f"{path} is a config of one run: pfl fit --config {path}. A study names it as its base, as in {{base: "
            f"{path.name}, methods: ..., seeds: [0, 1]}}"
        )
    entries = content.mapping((*KEYS, "scales"))
    scales = entries.pop("scales").mapping() if "scales" in entries else {}
    study = _with(Study(path.stem, path.stem, (), {"": ()}, {}), entries)
    studies = {"": study}
    for name, entry in scales.items():  # all are checked, whichever is asked for
        studies[name] = replace(_with(study, entry.mapping(KEYS)), scale=name)
        _check(studies[name], entry.place)
    if scale not in studies:
        has = f"; it has {', '.join(scales)}{did_you_mean(scale, scales)}" if scales else ""
        raise UsageError(f"{path} has no scale {scale!r}{has}")
    if not scale:
        _check(study, str(path))
    return replace(studies[scale], scales=tuple(scales))


def _with(study: Study, entries: Mapping[str, Entry]) -> Study:
    """A study with what a file or a scale says laid over it."""
    new: dict[str, Any] = {}
    for key, entry in entries.items():
        new[key] = EMPTY[key] if entry.value is None and key in EMPTY else KEYS[key](entry, study)
    return replace(study, **new)


def _layers(known: Layers, entry: Entry) -> Layers:
    """Configs by name: a mapping is laid over those that are known, a list selects from them.

    Where the list names one with a config, ``{NAME: {...}}``, that is laid over the known one.
    """
    selected = isinstance(entry.value, list) and bool(known)
    found: dict[str, tuple[Config, ...]] = {} if selected else dict(known)
    parts = [entry.at(number, one) for number, one in enumerate(entry.value)] if selected else [entry]
    for part in parts:
        by_name = selected and isinstance(part.value, str)
        named: Mapping[str, Entry | None]
        named = {part.value: None} if by_name else part.mapping(expected="a mapping of names to configs")
        for name, config in named.items():
            if selected and (name in found or name not in known):
                raise entry.error(f"different names of {', '.join(known)}{did_you_mean(name, known)}")
            for key, instead in OF_THE_STUDY.items():  # a whole config in a file of its own may have it
                if config is not None and isinstance(config.value, Mapping) and key in config.value:
                    raise UsageError(
                        f"{config.place}: {key} is the study's own, so that it would have no effect here: {instead}"
                    )
            found[name] = known.get(name, ()) + (config.configs() if config is not None else ())
    if not found:
        raise entry.error("at least one name with its config")
    return found


def _search(entry: Entry) -> Search:
    entries = entry.mapping(("trials", "space", "methods", "seed", "prune"))
    methods, own = entries.get("methods"), dict[str, dict[str, Dimension]]()
    if methods is not None and isinstance(methods.value, Mapping):
        own = {name: {} if one.value is None else _space(one) for name, one in methods.mapping().items()}
    space = _space(entries["space"]) if "space" in entries else {}
    if "trials" not in entries or not (space or (own and all(own.values()))):
        raise entry.error("trials, and a space with at least one option and its values for each method")
    names = tuple(own) or (methods.names() if methods is not None else ())
    given: dict[str, Any] = {"seed": entries["seed"].integer()} if "seed" in entries else {}
    given |= {"prune": entries["prune"].of(bool, "true or false")} if "prune" in entries else {}
    return Search(entries["trials"].integer(at_least=1), space, names, own=own, **given)


def _space(entry: Entry) -> dict[str, Dimension]:
    return {path: _dimension(one) for path, one in entry.options("a mapping of options to what is tried").items()}


def _dimension(entry: Entry) -> Dimension:
    expected = "{choices: [...]} or {low: ..., high: ..., log: true}, low below high, both above 0 where log is true"
    entries = entry.mapping(("choices", "low", "high", "log"), expected)
    if {*entries} == {"choices"}:
        return Dimension(choices=entries["choices"].values())
    if "choices" in entries or not {"low", "high"} <= {*entries}:
        raise entry.error(expected)
    low, high = entries["low"].number(), entries["high"].number()
    log = "log" in entries and entries["log"].of(bool, "true or false")
    if low >= high or (log and low <= 0):
        raise entry.error(expected)
    return Dimension(low=low, high=high, log=log, integer=isinstance(low, int) and isinstance(high, int))


def _published(entry: Entry) -> Published:
    entries = entry.mapping(("source", "figures"))
    figures = entries["figures"].mapping() if "figures" in entries else {}
    by_setting = {"": figures}
    if all(isinstance(one.value, Mapping) for one in figures.values()):
        by_setting = {setting: one.mapping() for setting, one in figures.items()}
    found = {
        setting: {row: float(one.number("a figure in %")) for row, one in rows.items()}
        for setting, rows in by_setting.items()
    }
    return Published(entries["source"].of(str, "a text") if "source" in entries else "", found)


KEYS: dict[str, Callable[[Entry, Study], Any]] = {
    "title": lambda entry, study: entry.of(str, "a text"),
    "base": lambda entry, study: study.base + entry.configs(),
    "settings": lambda entry, study: _layers({} if "" in study.settings else study.settings, entry),
    "methods": lambda entry, study: _layers(study.methods, entry),
    "grid": lambda entry, study: {
        path: one.values() for path, one in entry.options("options by their paths, with lists of values").items()
    },
    "search": lambda entry, study: _search(entry),
    "seeds": lambda entry, study: entry.list_of("whole numbers", lambda one: one.integer(below=2**32)),  # as numpy
    "seed_options": lambda entry, study: entry.names(),
    "skip_training": lambda entry, study: entry.names() if entry.value else (),
    "choice": lambda entry, study: entry.one_of(CHOICES),
    "figure": lambda entry, study: entry.one_of(FIGURES),
    "target_accuracy": lambda entry, study: float(entry.number("an accuracy in (0, 1]", lambda value: 0 < value <= 1)),
    "published": lambda entry, study: _published(entry),
}
"""What a study file and each of its scales may hold, with the readers."""

EMPTY: dict[str, Any] = {
    **{"settings": {"": ()}, "grid": {}, "search": None, "target_accuracy": None, "published": Published()}
}
"""What keys are that are given without a value, such as in a scale."""

OF_THE_STUDY = {
    "seed_everything": "seeds: [0, 1] gives every run its seed",
    "run_dir": "--output says the folder",
}
"""Options that the study itself gives every run, and how."""


def _check(study: Study, place: str) -> None:
    """Check what more than one key has to do with."""
    if not study.methods:
        raise UsageError(f"{place}: methods are missing; give at least one, as in methods: {{FedAvg: {{...}}}}")
    in_grid = {short_path(path) for path in study.grid}
    for path in study.search.paths if study.search is not None else ():
        if short_path(path) in in_grid:
            raise UsageError(f"{place}: search.space: {path} is in the grid, too: leave it out of one of them")
    if study.scale:  # which may leave methods and settings out
        return
    for key, names, known in (
        ("skip_training: no method", study.skip_training, study.methods),
        ("search.methods: no method", study.search.methods if study.search else (), study.methods),
        ("published.figures: no setting", study.published.figures, study.settings),
    ):
        for name in names:
            if name not in known:
                raise UsageError(f"{place}: {key} {name!r}{did_you_mean(name, known)} (there are {', '.join(known)})")
