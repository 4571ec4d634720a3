"""Study files: what each key may hold. Every error names its place, what was expected, and what came."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pfl_lightning.cli.config_files import read_yaml
from pfl_lightning.errors import UsageError
from pfl_lightning.names import did_you_mean
from pfl_lightning.runs.config import equal
from pfl_lightning.runs.results import CHOICES, FIGURES
from pfl_lightning.study.options import Config, short_path

NUMBER = int | float


@dataclass(frozen=True)
class Dimension:
    """Values that a search tries for an option: choices, or a range.

    Attributes:
        choices: The values; empty for a range.
        low: Lowest value of a range.
        high: Highest value of a range.
        log: Whether the range is searched on a logarithmic scale.
        integer: Whether its values are whole numbers.
    """

    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    integer: bool = False


@dataclass(frozen=True)
class Search:
    """A search for options by validation accuracy.

    Attributes:
        trials: Trials of each method in each setting.
        space: What is tried, by path of option.
        seed: Seed of the sampler.
        prune: Whether trials that fall behind are ended early.
        methods: The methods that are searched, each with what is tried of it beside that, by path of option; empty for
            all of them.
    """

    trials: int
    space: Mapping[str, Dimension]
    seed: int = 0
    prune: bool = True
    methods: Mapping[str, Mapping[str, Dimension]] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[str, ...]:
        """Every option that is searched of any method."""
        return tuple(dict.fromkeys([*self.space, *(path for own in self.methods.values() for path in own)]))


@dataclass(frozen=True)
class Published:
    """Figures of a paper, in %.

    Attributes:
        source: Paper and table.
        figures: By setting ("" without settings) and label of the row.
    """

    source: str = ""
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Content of a study file, with one of its scales applied.

    Attributes:
        name: Name of the file without its ending.
        title: Title of the table.
        base: Configs that each run starts from; later ones win.
        settings: Configs of the blocks of the table, by name; one setting "" where the study has none.
        methods: Configs of the methods, by name; later ones win.
        grid: Values by path of option; each combination makes a row.
        search: The search for options, if any.
        seeds: One run of each row for each.
        seed_options: Paths of the options that take the seed; empty for those that a config has.
        skip_training: Methods that are only personalized.
        choice: Which round's accuracies the table shows.
        figure: Which accuracies the table shows.
        metric: The further metric that it shows in their place.
        target_accuracy: For rounds and bytes to a target, in [0, 1].
        published: The paper's figures.
        scale: Name of the scale, "" for none.
        scales: Names of all scales.
    """

    name: str
    title: str
    base: tuple[Config, ...] = ()
    settings: Mapping[str, tuple[Config, ...]] = field(default_factory=lambda: {"": ()})
    methods: Mapping[str, tuple[Config, ...]] = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    search: Search | None = None
    seeds: tuple[int, ...] = (0,)
    seed_options: tuple[str, ...] = ()
    skip_training: tuple[str, ...] = ()
    choice: str = "last"
    figure: str = "test"
    metric: str = "accuracy"
    target_accuracy: float | None = None
    published: Published = Published()
    scale: str = ""
    scales: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A value in a study file. Its readers raise a UsageError that names the place where the value is another."""

    place: str  # such as "study.yaml: grid.lr"
    value: Any
    folder: Path  # of the study file, which paths are relative to

    def at(self, key: object, value: Any) -> Entry:
        """The entry of a key."""
        separator = ": " if self.place.endswith((".yaml", ".yml")) else "."
        return Entry(f"{self.place}{separator}{key}", value, self.folder)

    def error(self, expected: str) -> UsageError:
        """The error that something else was expected here."""
        text = repr(self.value)
        return UsageError(f"{self.place}: expected {expected}, got {text[:80]}{' ...' * (len(text) > 80)}")

    def of(self, kind: Any, expected: str, fits: Callable[[Any], bool] | None = None) -> Any:
        """The value, which is of a kind and fits; true is no number, nor is NaN."""
        of_kind = isinstance(self.value, kind) and isinstance(self.value, bool) is (kind is bool)
        fits = math.isfinite if fits is None and kind is NUMBER else fits
        if not of_kind or (fits is not None and not fits(self.value)):
            raise self.error(expected)
        return self.value

    def integer(self, at_least: int = 0) -> int:
        """A whole number, which numpy takes as a seed."""
        expected = f"a whole number of at least {at_least} and below {2**32}"
        return int(self.of(int, expected, lambda value: at_least <= value < 2**32))

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

    def config(self) -> Config:
        """A config: a mapping, or the path of a file, relative to the study file."""
        content = {} if self.value is None else self.value
        if isinstance(content, str):
            content = read_yaml(self.folder / content, self.place)
        # Keys of a class, without a word on what the class is.
        if not isinstance(content, Mapping) or {"class_path", "init_args"} & {*content}:
            raise self.error("a config with keys such as model, data and trainer, or the path of a YAML file of one")
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
    entries = Entry(str(path), read_yaml(path), path.parent).mapping((*KEYS, "scales"))
    scales = entries.pop("scales").mapping() if "scales" in entries else {}
    study = _with(Study(path.stem, path.stem), entries)
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
    new = dict[str, Any]()
    for key, entry in entries.items():  # one without a value takes back what it has, such as in a scale
        takes_back = entry.value is None and key in ("settings", "grid", "search", "target_accuracy", "published")
        new[key] = getattr(Study("", ""), key) if takes_back else KEYS[key](entry, study)
    return replace(study, **new)


def _layers(known: Mapping[str, tuple[Config, ...]], entry: Entry) -> Mapping[str, tuple[Config, ...]]:
    """Configs by name: a mapping is laid over those that are known; a list selects, and may change what it selects."""
    selected = isinstance(entry.value, list) and bool(known)
    found: dict[str, tuple[Config, ...]] = {} if selected else dict(known)
    parts = [entry]
    if selected:
        parts = [entry.at(place, {one: {}} if isinstance(one, str) else one) for place, one in enumerate(entry.value)]
    for part in parts:
        for name, config in part.mapping(expected="a mapping of names to configs").items():
            if selected and (name in found or name not in known):
                raise entry.error(f"different names of {', '.join(known)}{did_you_mean(name, known)}")
            own = {"seed_everything", "run_dir"} & {*config.value} if isinstance(config.value, Mapping) else ()
            if own:  # a whole config in a file of its own may have it
                raise UsageError(
                    f"{config.place}: {', '.join(sorted(own))} is the study's own: give seeds, or --output"
                )
            found[name] = known.get(name, ()) + config.configs()
    if not found:
        raise entry.error("at least one name with its config")
    return found


def _search(entry: Entry) -> Search:
    entries = entry.mapping(("trials", "space", "methods", "seed", "prune"))
    space, methods = _space(entries["space"]) if "space" in entries else {}, dict[str, dict[str, Dimension]]()
    if (named := entries.get("methods")) is not None and isinstance(named.value, Mapping):
        methods = {name: _space(one) if one.value is not None else {} for name, one in named.mapping().items()}
    elif named is not None:
        methods = {name: {} for name in named.names()}
    if "trials" not in entries or not (space or (methods and all(methods.values()))):
        raise entry.error("trials, and a space with at least one option and its values for each method")
    given: dict[str, Any] = {"seed": entries["seed"].integer()} if "seed" in entries else {}
    given |= {"prune": entries["prune"].of(bool, "true or false")} if "prune" in entries else {}
    return Search(entries["trials"].integer(at_least=1), space, methods=methods, **given)


def _space(entry: Entry) -> dict[str, Dimension]:
    return {path: _dimension(one) for path, one in entry.options("a mapping of options to what is tried").items()}


def _dimension(entry: Entry) -> Dimension:
    expected = "{choices: [...]} or {low: ..., high: ..., log: true}, low below high, both above 0 where log is true"
    entries = entry.mapping(("choices", "low", "high", "log"), expected)
    if {*entries} == {"choices"}:
        return Dimension(choices=entries["choices"].list_of("values", lambda one: one.value))
    if "choices" in entries or not {"low", "high"} <= {*entries}:
        raise entry.error(expected)
    low, high = (entries[end].of(NUMBER, "a number") for end in ("low", "high"))
    log = "log" in entries and entries["log"].of(bool, "true or false")
    if low >= high or (log and low <= 0):
        raise entry.error(expected)
    return Dimension(low=low, high=high, log=log, integer=isinstance(low, int) and isinstance(high, int))


def _published(entry: Entry) -> Published:
    entries = entry.mapping(("source", "figures"))
    figures = entries["figures"].mapping() if "figures" in entries else {}
    has_settings = all(isinstance(one.value, Mapping) for one in figures.values())
    by_setting = {name: one.mapping() for name, one in figures.items()} if has_settings else {"": figures}
    found = {
        setting: {row: float(one.of(NUMBER, "a figure in %")) for row, one in rows.items()}
        for setting, rows in by_setting.items()
    }
    return Published(entries["source"].of(str, "a text") if "source" in entries else "", found)


KEYS: dict[str, Callable[[Entry, Study], Any]] = {
    "title": lambda entry, study: entry.of(str, "a text"),
    "base": lambda entry, study: study.base + entry.configs(),
    "settings": lambda entry, study: _layers({} if "" in study.settings else study.settings, entry),
    "methods": lambda entry, study: _layers(study.methods, entry),
    "grid": lambda entry, study: {  # 1 and 1.0 are two values, such as of clients and their share
        path: one.list_of("values", lambda one: one.value)
        for path, one in entry.options("options by their paths, with lists of values").items()
    },
    "search": lambda entry, study: _search(entry),
    "seeds": lambda entry, study: entry.list_of("whole numbers", lambda one: one.integer()),
    "seed_options": lambda entry, study: entry.names(),
    "skip_training": lambda entry, study: entry.names() if entry.value else (),
    "choice": lambda entry, study: entry.one_of(CHOICES),
    "figure": lambda entry, study: entry.one_of(tuple(FIGURES)),
    "metric": lambda entry, study: entry.of(str, "the name of a metric"),
    "target_accuracy": lambda entry, study: float(entry.of(NUMBER, "an accuracy in (0, 1]", lambda a: 0 < a <= 1)),
    "published": lambda entry, study: _published(entry),
}
"""What a study file and each of its scales may hold, with the readers."""


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
