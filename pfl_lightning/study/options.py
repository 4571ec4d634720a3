"""Configs as nested mappings: merged, read and changed by paths of options, and as YAML files.

A path of an option is one such as ``model.method.init_args.lr``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pfl_lightning.cli.config_files import load_yaml
from pfl_lightning.runs.config import KNOWN_PACKAGES, equal, option_of
from pfl_lightning.state.files import replace_file

Config = Mapping[str, Any]
"""A config, as it stands in a YAML file."""

_OF_A_CLASS = ("class_path", "init_args", "dict_kwargs")


def merge(below: Any, above: Any) -> Any:
    """One config laid over another: mappings are merged key by key, all else is replaced.

    A mapping with another ``class_path`` replaces the class below with its arguments; a class is the same under its
    name alone and under its import path, and one of this package or of torch under each of its import paths. The name
    of the class below alone, without a mapping, leaves it its arguments. Arguments below without a class are those of
    any class. A mapping over the name of a class gives that class arguments. Options beside a ``class_path`` are its
    arguments, as they are where :func:`with_option` sets them.

    Args:
        below: The config that is changed; it is left as it is.
        above: What wins.

    Example:
        >>> from pfl_lightning.study.options import merge
        >>> merge({"class_path": "FedAvg", "init_args": {"lr": 0.1}}, {"init_args": {"epochs": 2}})
        {'class_path': 'FedAvg', 'init_args': {'lr': 0.1, 'epochs': 2}}
        >>> merge({"class_path": "FedAvg", "init_args": {"lr": 0.1}}, {"class_path": "FedPer"})
        {'class_path': 'FedPer'}
    """
    if isinstance(above, str) and isinstance(below, Mapping) and below and set(below) <= set(_OF_A_CLASS[1:]):
        above = {"class_path": above}
    if isinstance(above, str) and _is_class(below) and not _is_other_class(below, {"class_path": above}):
        return dict(below)  # the same class by its name alone
    if not isinstance(above, Mapping):
        return above
    if isinstance(below, str) and above and set(above) <= set(_OF_A_CLASS):
        below = {"class_path": below}
    if not isinstance(below, Mapping) or _is_other_class(below, above):
        below = {}
    merged = dict(below)
    of_class = "class_path" in below or "class_path" in above
    for key, value in above.items():
        if of_class and key not in _OF_A_CLASS:
            key, value = "init_args", {key: value}
        merged[key] = merge(merged.get(key), value)
    return merged


def _is_class(config: Any) -> bool:
    return isinstance(config, Mapping) and "class_path" in config and set(config) <= set(_OF_A_CLASS)


def _is_other_class(below: Config, above: Config) -> bool:
    paths = [str(config.get("class_path", "")) for config in (below, above)]
    if not all(paths):
        return False
    if len({path.rpartition(".")[2] for path in paths}) > 1:
        return True
    packages = [path.partition(".")[0] for path in paths if "." in path]
    return len(packages) > 1 and len({*paths}) > 1 and not (len({*packages}) == 1 and packages[0] in KNOWN_PACKAGES)


def short_path(path: str) -> str:
    """The path of an option without what may be left out, ``init_args``."""
    return ".".join(key for key in path.removesuffix("+").split(".") if key != "init_args")


def with_option(config: Config, path: str, value: Any) -> dict[str, Any]:
    """A config with an option set, merged over what is there.

    Args:
        config: A config; it is left as it is.
        path: Path of the option; ``init_args`` may be left out, and a ``+`` at its end adds to a list.
        value: Its value.

    Example:
        >>> from pfl_lightning.study.options import with_option
        >>> with_option({"model": {"method": {"class_path": "FedAvg"}}}, "model.method.lr", 0.1)
        {'model': {'method': {'class_path': 'FedAvg', 'init_args': {'lr': 0.1}}}}
    """
    key, _, rest = path.partition(".")
    if "class_path" in config and key not in _OF_A_CLASS:
        key, rest = "init_args", path
    below = config.get(key)
    if rest:
        if isinstance(below, str):
            below = {"class_path": below}
        value = with_option(below if isinstance(below, Mapping) else {}, rest, value)
        return {**config, key: value}
    if key.endswith("+"):
        key = key.removesuffix("+")
        return {**config, key: [*_listed(config.get(key)), *_listed(value)]}
    return {**config, key: merge(below, value)}


def with_options(config: Config, options: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A config with several options set, whatever their order: a class before its arguments.

    Args:
        config: A config; it is left as it is.
        options: Paths and values.

    Example:
        >>> from pfl_lightning.study.options import with_options
        >>> with_options({"model": {"method": "FedAvg"}}, [("model.method.lr", 0.1), ("model.method", "FedPAC")])
        {'model': {'method': {'class_path': 'FedPAC', 'init_args': {'lr': 0.1}}}}
    """
    found = dict(config)
    for path, value in sorted(options, key=lambda one: short_path(one[0]).count(".")):
        found = with_option(found, path, value)
    return found


def has_value(config: Config, path: str, value: Any) -> bool:
    """Whether a config has an option at a value; not looked at where that is a list or a mapping.

    Args:
        config: A config.
        path: Path of the option.
        value: The value; a class by its name.
    """
    if isinstance(value, Mapping | list | tuple) or path.endswith("+"):
        return True
    found = option_of(config, path)
    if isinstance(found, Mapping) and "class_path" in found:
        return str(found["class_path"]).rpartition(".")[2] == str(value).rpartition(".")[2]
    return equal(found, value)


def _listed(value: Any) -> Sequence[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


# ---------------------------------------------------------------------- as files, read as the command line does


def value_of(text: str) -> Any:
    """The value of an option of the command line; what is no YAML is a text."""
    try:
        return load_yaml(text)
    except yaml.YAMLError:
        return text


def write_yaml(path: Path, content: Any) -> None:
    """Write a YAML file, whole or not at all."""
    with replace_file(path, shared=True) as temporary:
        temporary.write_text(_dump(content), encoding="utf-8")


def as_read(content: Any) -> Any:
    """What is read of a file of this content."""
    return load_yaml(_dump(content))


def _dump(content: Any) -> str:
    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return text
