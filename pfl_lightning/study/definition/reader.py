"""Reader of study files: what each key may hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pfl_lightning.errors import UsageError
from pfl_lightning.names import did_you_mean
from pfl_lightning.study.definition.entry import Entry
from pfl_lightning.study.definition.options import Config, read_yaml, short_path
from pfl_lightning.study.definition.study import CHOICES, FIGURES, Dimension, Published, Search, Study

__all__ = ["read_study"]

Layers = Mapping[str, tuple[Config, ...]]
"""Configs by the name of a method or a setting; later ones win."""


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
    """Configs by name: a mapping is laid over those that are known, a list selects from them."""
    if isinstance(entry.value, list) and known:
        return _selected(known, entry)
    found = dict(known)
    for name, config in entry.mapping(expected="a mapping of names to configs").items():
        for key, instead in OF_THE_STUDY.items():  # a whole config in a file of its own may have it
            if isinstance(config.value, Mapping) and key in config.value:
                raise UsageError(
                    f"{config.place}: {key} is the study's own, so that it would have no effect here: {instead}"
                )
        found[name] = found.get(name, ()) + config.configs()
    if not found:
        raise entry.error("at least one name with its config")
    return found


def _selected(known: Layers, entry: Entry) -> Layers:
    """Those that a list names; where it names one with a config, ``{NAME: {...}}``, that is laid over the known one."""
    found: dict[str, tuple[Config, ...]] = {}
    for one in entry.entries("a list of names"):
        configs = one.mapping() if isinstance(one.value, Mapping) else {one.text(): None}
        for name, config in configs.items():
            if name not in known:
                raise entry.error(f"names of {', '.join(known)}{did_you_mean(name, known)}")
            if name in found:
                raise entry.error("different names")
            found[name] = known[name] + (config.configs() if config is not None else ())
    return found


def _grid(entry: Entry) -> dict[str, tuple[Any, ...]]:
    lists = entry.options("a mapping of options to lists of values")
    if any(not path.strip(".") for path in lists):
        raise entry.error("options by their paths, such as model.method.init_args.lr, and not an empty name")
    return {path: one.values() for path, one in lists.items()}


def _search(entry: Entry) -> Search:
    entries = entry.mapping(("trials", "space", "methods", "seed", "prune"))
    methods, own = entries.get("methods"), dict[str, dict[str, Dimension]]()
    names: tuple[str, ...] = ()
    if methods is not None and isinstance(methods.value, Mapping):
        spaces = methods.mapping()
        if not spaces:
            raise methods.error("names of methods, as a list or with the options that are searched of each")
        own = {name: {} if one.value is None else _space(one) for name, one in spaces.items()}
    elif methods is not None:
        names = methods.names()
    for key in ("trials",) if own else ("trials", "space"):
        if key not in entries:
            raise UsageError(f"{entry.place}: {key} is missing")
    space = _space(entries["space"]) if "space" in entries else {}
    without = [spaces[name] for name, options in own.items() if not options] if own else [entries["space"]]
    if without and not space:
        raise without[0].error("at least one option with its values")
    given: dict[str, Any] = {"seed": entries["seed"].integer()} if "seed" in entries else {}
    given |= {"prune": entries["prune"].of(bool, "true or false")} if "prune" in entries else {}
    return Search(entries["trials"].integer(at_least=1), space, tuple(own) or names, own=own, **given)


def _space(entry: Entry) -> dict[str, Dimension]:
    return {path: _dimension(one) for path, one in entry.options().items()}


def _dimension(entry: Entry) -> Dimension:
    entries = entry.mapping(("choices", "low", "high", "log"), "{choices: [...]} or {low: ..., high: ..., log: true}")
    if "choices" in entries and len(entries) > 1:
        raise entry.error("either choices, or low and high")
    if "choices" in entries:
        return Dimension(choices=entries["choices"].values())
    if not {"low", "high"} <= set(entries):
        raise entry.error("choices, or low and high")
    low, high = entries["low"].number(), entries["high"].number()
    log = "log" in entries and entries["log"].of(bool, "true or false")
    if low >= high or (log and low <= 0):
        raise entry.error("low below high, both above 0 on a logarithmic scale")
    return Dimension(low=low, high=high, log=log, integer=isinstance(low, int) and isinstance(high, int))


def _published(entry: Entry) -> Published:
    entries = entry.mapping(("source", "figures"))
    figures = entries["figures"].mapping() if "figures" in entries else {}
    by_setting = {"": figures}
    if all(isinstance(one.value, Mapping) for one in figures.values()):
        by_setting = {setting: one.mapping() for setting, one in figures.items()}
    found = {}
    for setting, rows in by_setting.items():
        found[setting] = {row: float(one.number("a figure in %")) for row, one in rows.items()}
    return Published(entries["source"].text() if "source" in entries else "", found)


KEYS: dict[str, Callable[[Entry, Study], Any]] = {
    "title": lambda entry, study: entry.text(),
    "base": lambda entry, study: study.base + entry.configs(),
    "settings": lambda entry, study: _layers({} if "" in study.settings else study.settings, entry),
    "methods": lambda entry, study: _layers(study.methods, entry),
    "grid": lambda entry, study: _grid(entry),
    "search": lambda entry, study: _search(entry),
    "seeds": lambda entry, study: entry.seeds(),
    "seed_options": lambda entry, study: entry.names(),
    "skip_training": lambda entry, study: entry.names() if entry.value else (),
    "choice": lambda entry, study: entry.one_of(CHOICES),
    "figure": lambda entry, study: entry.one_of(FIGURES),
    "target_accuracy": lambda entry, study: float(entry.number("an accuracy in (0, 1]", lambda value: 0 < value <= 1)),
    "published": lambda entry, study: _published(entry),
}
"""What a study file and each of its scales may hold, with the readers."""

EMPTY: dict[str, Any] = {
    "settings": {"": ()},
    "grid": {},
    "search": None,
    "target_accuracy": None,
    "published": Published(),
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
    named = {"skip_training": study.skip_training, "search.methods": study.search.methods if study.search else ()}
    for key, names in named.items():
        for name in names:
            if name not in study.methods:
                raise UsageError(f"{place}: {key}: no method {name!r}{did_you_mean(name, study.methods)}")
    for setting in study.published.figures:
        if not setting and "" not in study.settings:
            raise UsageError(
                f"{place}: published.figures: expected figures by setting and row, as in "
                f"{{{next(iter(study.settings))}: {{{next(iter(study.methods))}: 81.1}}}}, since the study has settings"
            )
        if setting not in study.settings:
            near = did_you_mean(setting, study.settings)
            raise UsageError(f"{place}: published.figures: no setting {setting!r}{near}")
