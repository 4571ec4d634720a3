"""Reader of study files: every error names the place in the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pfl_lightning.errors import UsageError
from pfl_lightning.study.definition.entry import Entry
from pfl_lightning.study.definition.options import Config, short_path
from pfl_lightning.study.definition.search_reader import read_search, refuse_same_option
from pfl_lightning.study.definition.study import CHOICES, FIGURES, Published, Study
from pfl_lightning.study.definition.yaml_file import read_yaml
from pfl_lightning.text import did_you_mean

__all__ = ["read_study"]

KEYS = (
    *("title", "base", "settings", "methods", "grid", "search", "seeds", "seed_options", "skip_training"),
    *("choice", "figure", "target_accuracy", "published"),
)
"""What a study file and each of its scales may hold."""


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
    for name, entry in scales.items():  # all are checked, whichever is asked for
        scaled = replace(_with(study, entry.mapping(KEYS)), scale=name)
        _check(scaled, entry.place)
        if name == scale:
            found = scaled
    if not scale:
        found = study
        _check(study, str(path))
    elif scale not in scales:
        has = f"; it has {', '.join(scales)}{did_you_mean(scale, scales)}" if scales else ""
        raise UsageError(f"{path} has no scale {scale!r}{has}")
    return replace(found, scales=tuple(scales))


def _with(study: Study, entries: Mapping[str, Entry]) -> Study:
    """A study with what a file or a scale says laid over it."""
    new: dict[str, Any] = {}
    for key, entry in entries.items():
        match key:
            case "title":
                new[key] = entry.text()
            case "base":
                new[key] = study.base + entry.configs()
            case "settings":
                known = {} if set(study.settings) == {""} else study.settings
                new[key] = {"": ()} if entry.value is None else _layers(known, entry)
            case "methods":
                new[key] = _layers(study.methods, entry)
            case "grid":
                new[key] = {} if entry.value is None else _grid(entry)
            case "search":
                new[key] = None if entry.value is None else read_search(entry)
            case "seeds":
                new[key] = tuple(seed.integer() for seed in entry.entries("a list of whole numbers"))
                if len(set(new[key])) < len(new[key]):
                    raise entry.error("different seeds")
                if max(new[key]) >= 2**32:  # more than numpy takes
                    raise entry.error("seeds below 2^32")
            case "seed_options":
                new[key] = entry.names()
            case "skip_training":
                new[key] = entry.names() if entry.value else ()
            case "choice":
                new[key] = entry.one_of(CHOICES)
            case "figure":
                new[key] = entry.one_of(FIGURES)
            case "target_accuracy":
                new[key] = None if entry.value is None else _share(entry)
            case "published":
                new[key] = Published() if entry.value is None else _published(entry)
    return replace(study, **new)


def _layers(known: Mapping[str, tuple[Config, ...]], entry: Entry) -> dict[str, tuple[Config, ...]]:
    """Configs by name: a mapping is laid over those that are known, a list selects from them."""
    if isinstance(entry.value, list) and known:
        return _selected(known, entry)
    found = dict(known)
    for name, config in entry.mapping(expected="a mapping of names to configs").items():
        _refuse_of_the_study(config)
        found[name] = found.get(name, ()) + config.configs()
    if not found:
        raise entry.error("at least one name with its config")
    return found


def _refuse_of_the_study(config: Entry) -> None:
    """Refuse what the study itself says of every run; a whole config in a file of its own may have it."""
    given = [key for key in ("seed_everything", "run_dir") if isinstance(config.value, Mapping) and key in config.value]
    if given:
        has = "seeds: [0, 1] gives every run its seed" if given[0] == "seed_everything" else "--output says the folder"
        raise UsageError(f"{config.place}: {given[0]} is the study's own, so that it would have no effect here: {has}")


def _selected(known: Mapping[str, tuple[Config, ...]], entry: Entry) -> dict[str, tuple[Config, ...]]:
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
    lists = entry.mapping(expected="a mapping of options to lists of values")
    if any(not path.strip(".") for path in lists):
        raise entry.error("options by their paths, such as model.method.init_args.lr, and not an empty name")
    refuse_same_option(entry, lists)
    return {path: values.different_values() for path, values in lists.items()}


def _share(entry: Entry) -> float:
    if not 0 < entry.number() <= 1:
        raise entry.error("an accuracy in (0, 1]")
    return float(entry.value)


def _published(entry: Entry) -> Published:
    entries = entry.mapping(("source", "figures"))
    figures = entries["figures"].mapping() if "figures" in entries else {}
    by_setting = figures if all(isinstance(one.value, Mapping) for one in figures.values()) else {"": None}
    found = {}
    for setting, of_setting in by_setting.items():
        rows = figures if of_setting is None else of_setting.mapping()
        found[setting] = {row: float(one.number("a figure in %")) for row, one in rows.items()}
    return Published(entries["source"].text() if "source" in entries else "", found)


def _check(study: Study, place: str) -> None:
    """Check what more than one key has to do with."""
    if not study.methods:
        raise UsageError(f"{place}: methods are missing; give at least one, as in methods: {{FedAvg: {{...}}}}")
    in_grid = {short_path(path) for path in study.grid}
    for path in study.search.paths if study.search is not None else ():
        if short_path(path) in in_grid:
            raise UsageError(f"{place}: search.space: {path} is in the grid, too: leave it out of one of them")
    named = {"skip_training": study.skip_training, "search.methods": study.search.methods if study.search else ()}
    for key, names in named.items():
        for name in names:
            if name not in study.methods and not study.scale:  # a scale may leave methods out
                raise UsageError(f"{place}: {key}: no method {name!r}{did_you_mean(name, study.methods)}")
    if study.scale:
        return
    for setting in study.published.figures:
        if not setting and "" not in study.settings:
            raise UsageError(
                f"{place}: published.figures: expected figures by setting and row, as in "
                f"{{{next(iter(study.settings))}: {{{next(iter(study.methods))}: 81.1}}}}, since the study has settings"
            )
        if setting not in study.settings:
            raise UsageError(
                f"{place}: published.figures: no setting {setting!r}{did_you_mean(setting, study.settings)}"
            )
