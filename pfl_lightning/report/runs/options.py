"""Options of a run's config: what tells one configuration from another, and its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["alike", "differing", "equal", "find_seeds", "flatten", "run_options", "same_options", "short_names", "show"]

SETTINGS = (
    *("model.method", "model.encoder", "data", "loop", "personalize"),
    *("trainer.precision", "trainer.gradient_clip_val"),
    *("trainer.limit_train_batches", "trainer.limit_val_batches", "trainer.limit_test_batches"),
)
"""Settings that runs of one configuration share; their seeds may differ."""

CLIPPING = "norm"
"""How engines clip unless they are told otherwise."""

KNOWN_PACKAGES = ("pfl_lightning", "torch", "torchvision", "lightning")
"""Packages whose classes are known by their names alone, wherever a version of the package has them."""

PLACES = ("seed", "root", "cache_dir")
"""Options below these that make no difference to what is compared."""


def run_options(config: Mapping[str, Any], method: str, arguments: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """What tells a configuration from others, by path, apart from seeds and places.

    Args:
        config: The run's config; empty for a run that was not started from the command line.
        method: Name of the method's class.
        arguments: The method's arguments, for a run without a config.
        rounds: Rounds that were planned, or played.

    Example:
        >>> data = {"class_path": "pfl_lightning.datamodules.Digits", "init_args": {"seed": 3, "batch_size": 10}}
        >>> run_options({"data": data}, "FedAvg", {"lr": 0.1}, rounds=30)
        {'model.method': 'FedAvg', 'model.method.lr': 0.1, 'rounds': 30, 'data': 'Digits', 'data.batch_size': 10}
    """
    found: dict[str, Any] = {"model.method": method}
    if _at(config, "model.method") is None:
        found |= flatten("model.method", dict(arguments))
    found["rounds"] = rounds
    for name in SETTINGS:
        value = _at(config, name)
        if value is not None:
            found |= flatten(name, value)
    return found | _clipping(_at(config, "model.engine")) | {"model.method": method}


def _clipping(engine: Any) -> dict[str, Any]:
    """What clips gradients; the command line moves the Trainer's options to the engine, or to that of its workers."""
    arguments = engine.get("init_args") if isinstance(engine, Mapping) else None
    if not isinstance(arguments, Mapping):
        return {}
    value, algorithm = arguments.get("gradient_clip_val"), arguments.get("gradient_clip_algorithm")
    found = {} if value is None else {"trainer.gradient_clip_val": value}
    if found and algorithm not in (None, CLIPPING):
        found["trainer.gradient_clip_algorithm"] = algorithm
    return _clipping(arguments.get("engine")) | found


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def flatten(path: str, value: Any) -> dict[str, Any]:
    """The options below a path; an object is the name of its class and its arguments.

    A class of the user's has its import path, too, which tells it from another one of that name.

    Example:
        >>> flatten("optimizer", {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "seed": 3}})
        {'optimizer': 'SGD', 'optimizer.lr': 0.1}
        >>> flatten("encoder", {"class_path": "models.small.Net"})
        {'encoder': 'Net', 'encoder.class': 'models.small.Net'}
    """
    if isinstance(value, Mapping):
        if "class_path" in value:
            whole = str(value["class_path"])
            package, _, _ = whole.partition(".")
            found = {path: whole.rpartition(".")[2]}
            if package != whole and package not in KNOWN_PACKAGES:
                found[f"{path}.class"] = whole
            return found | flatten(path, value.get("init_args") or {})
        items = [(key, entry) for key, entry in value.items() if key not in PLACES]
        return {key: entry for name, below in items for key, entry in flatten(f"{path}.{name}", below).items()}
    if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        return flatten(path, {str(number): entry for number, entry in enumerate(value)})
    return {path: value}


def find_seeds(value: Any) -> list[int]:
    """Every seed below a value, in a fixed order."""
    if isinstance(value, list):
        return [seed for entry in value for seed in find_seeds(entry)]
    if not isinstance(value, Mapping):
        return []
    found = []
    for key, entry in sorted(value.items()):
        found += [entry] if key == "seed" and isinstance(entry, int) else find_seeds(entry)
    return found


def differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Paths of the options in which configurations differ, in the order in which they appear.

    Arguments of objects of differing classes are left out: the class says it.

    Example:
        >>> differing([{"a": "SGD", "a.momentum": 0.9, "b": 1, "c": 2}, {"a": "Adam", "b": 1, "c": 3}])
        ['a', 'c']
    """
    paths = list(dict.fromkeys(path for one in options for path in one))
    found = [path for path in paths if any(not alike(one, options[0], path) for one in options)]
    return [path for path in found if not any(path.startswith(f"{other}.") for other in found)]


def same_options(options: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether two configurations have the same options with equal values."""
    return all(alike(options, others, path) for path in {**options, **others})


def alike(options: Mapping[str, Any], others: Mapping[str, Any], path: str) -> bool:
    """Whether two configurations have an option with equal values, or both do not have it."""
    return (path in options) == (path in others) and equal(options.get(path), others.get(path))


def equal(one: Any, other: Any) -> bool:
    """Whether two values of an option mean the same: 1 is a number of clients, 1.0 all of them, and true is neither.

    Example:
        >>> equal(2, 2.0), equal(1, 1.0), equal(1, True), equal(float("nan"), float("nan"))
        (True, False, False, True)
    """
    if one != one and other != other:  # NaN
        return True
    if one == 1 and other == 1:
        return type(one) is type(other)
    return bool(one == other)


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """The shortest ends of paths that tell them apart.

    Example:
        >>> short_names(["model.method.lr", "personalize.lr", "loop.cohort"])
        {'model.method.lr': 'method.lr', 'personalize.lr': 'personalize.lr', 'loop.cohort': 'cohort'}
    """
    found = {}
    for path in paths:
        parts = path.split(".")
        ends = [".".join(parts[-number:]) for number in range(1, len(parts) + 1)]
        fitting = (end for end in ends if not end[0].isdigit() and not any(_ends(o, end) for o in paths if o != path))
        found[path] = next(fitting, path)
    return found


def _ends(path: str, end: str) -> bool:
    return f".{path}".endswith(f".{end}")


def show(value: Any) -> str:
    """An option's value as in a config."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return "1.0" if value == 1 else f"{value:g}"
    return str(value)
