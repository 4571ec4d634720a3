"""Options of a run's config: what tells one configuration from another, and its seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SETTINGS = (
    *("model.method", "model.encoder", "model.server_optimizer", "model.privacy", "model.robust", "data", "loop"),
    *("stragglers", "personalize", "trainer.precision", "trainer.gradient_clip_val"),
    *("trainer.limit_train_batches", "trainer.limit_val_batches", "trainer.limit_test_batches"),
)
"""Settings that runs of one configuration share; their seeds may differ."""

CLIPPING = {"gradient_clip_val": None, "gradient_clip_algorithm": "norm"}
"""How engines clip, and what they do unless they are told otherwise."""

OF_ENGINES: dict[str, Any] = {
    **{"accumulate_grad_batches": 1, "max_steps": -1, "callbacks": None},
    **{"limit_train_batches": None, "limit_val_batches": None, "limit_test_batches": None},
}
"""Further options of engines that change the training or the evaluation, and their values where they do not."""

LATER: dict[str, Any] = {"loop.max_update_ratio": 1000.0, "loop.on_client_error": "skip"}
"""Options that runs of earlier versions do not have, with the values under which a run is like those."""

KNOWN_PACKAGES = ("pfl_lightning", "torch", "torchvision", "lightning")
"""Packages whose classes are known by their names alone, wherever a version of the package has them."""

_MISSING = object()

PLACES = ("seed", "root", "cache_dir")
"""Options below these that make no difference to what is compared."""


def run_options(config: Mapping[str, Any], method: str, arguments: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """What tells a configuration from others, by path, apart from seeds and places.

    Args:
        config: The run's config; empty for a run that was not started from the command line.
        method: Name of the method's class.
        arguments: The method's arguments, for a run without a config.
        rounds: Rounds that were planned, or done.

    Example:
        >>> data = {"class_path": "pfl_lightning.datamodules.Digits", "init_args": {"seed": 3, "batch_size": 10}}
        >>> run_options({"data": data}, "FedAvg", {"lr": 0.1}, rounds=30)
        {'model.method': 'FedAvg', 'model.method.lr': 0.1, 'rounds': 30, 'data': 'Digits', 'data.batch_size': 10}
    """
    found: dict[str, Any] = {"model.method": method}
    if option_of(config, "model.method") is None:
        found |= flatten("model.method", dict(arguments))
    found["rounds"] = rounds
    for name in SETTINGS:
        value = option_of(config, name)
        if value is not None:
            found |= flatten(name, value)
    if found.get("model.method.lr_scheduler") is None:
        found.pop("model.method.schedule", None)  # of no scheduler
    else:
        found.setdefault("model.method.schedule", "restart")  # as it was before there was a choice
    found = {path: value for path, value in found.items() if path not in LATER or value != LATER[path]}
    return found | _of_engine(option_of(config, "model.engine")) | {"model.method": method}


def _of_engine(engine: Any) -> dict[str, Any]:
    """What an engine, or that of its workers, trains otherwise; the command line moves the Trainer's clipping there."""
    arguments = engine.get("init_args") if isinstance(engine, Mapping) else None
    if not isinstance(arguments, Mapping):
        return {}
    found: dict[str, Any] = {}
    given = {name: arguments.get(name) for name in (*CLIPPING, *OF_ENGINES)}
    if given["gradient_clip_val"] is not None:
        found |= {f"trainer.{name}": given[name] for name in CLIPPING if _is_set(name, given[name])}
    for name in OF_ENGINES:
        if _is_set(name, given[name]):
            found |= flatten(f"engine.{name}", given[name])
    return _of_engine(arguments.get("engine")) | found


def _is_set(name: str, value: Any) -> bool:
    """Whether an option of an engine has another value than the one that changes nothing."""
    return value is not None and value != [] and value != {**CLIPPING, **OF_ENGINES}[name]


def changes_training(option: str, *values: Any) -> bool:
    """Whether an option of an engine with one of these values changes the training; most say how it is computed.

    Example:
        >>> changes_training("model.engine.init_args.max_steps", None, 3)
        True
        >>> changes_training("model.engine.init_args.max_steps", None, -1)  # of an engine that has the option
        False
    """
    name = option.rpartition(".")[2]
    of_an_engine = option.startswith("model.engine.") and name in {*CLIPPING, *OF_ENGINES}
    return of_an_engine and any(_is_set(name, value) for value in values)


def option_of(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value of an option.

    Args:
        config: A config.
        path: Path of the option, with or without ``init_args``.
        default: The answer where the config does not have it.
    """
    value: Any = config
    for key in path.split("."):
        if isinstance(value, Mapping) and key not in value and "class_path" in value:
            value = value.get("init_args")
        value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is _MISSING:
            return default
    return value


def is_below(path: str, *names: str) -> bool:
    """Whether an option is one of others or belongs to one.

    Example:
        >>> is_below("data.batch_size", "data"), is_below("data", "data"), is_below("database", "data", "loop")
        (True, True, False)
    """
    return any(path == name or path.startswith(f"{name}.") for name in names)


def flatten(path: str, value: Any) -> dict[str, Any]:
    """The options below a path; an object is the name of its class and its arguments.

    A class of the user's has its import path, too, which tells it from another class with the same name.

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


def metrics_of(config: Mapping[str, Any]) -> list[str]:
    """The further metrics that a config asks for, each by the name that results have."""
    asked = config.get("metrics") or option_of(config, "model.metrics") or ()
    return [str(name).rpartition(".")[2] for name in asked]


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


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """The options of a config by path, as it has them: :func:`flatten` without a view to what makes a configuration.

    Example:
        >>> leaves({"model": {"method": {"class_path": "FedAvg", "init_args": {"lr": 0.1}}}})
        {'model.method.class_path': 'FedAvg', 'model.method.init_args.lr': 0.1}
    """
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    below = (leaves(entry, f"{path}.{key}" if path else str(key)) for key, entry in value.items())
    return {option: entry for one in below for option, entry in one.items()}


def apart(one: Mapping[str, Any], other: Mapping[str, Any], missing: Any = _MISSING) -> Iterator[str]:
    """Paths of the options in which two configurations differ, those of the first in front.

    Args:
        one: Options by path.
        other: Those of another configuration.
        missing: Value of an option that a configuration does not have; by default none of its values.
    """
    return (path for path in {**one, **other} if not equal(one.get(path, missing), other.get(path, missing)))


def same_options(one: Mapping[str, Any], other: Mapping[str, Any], missing: Any = _MISSING) -> bool:
    """Whether :func:`apart` finds nothing."""
    return next(apart(one, other, missing), None) is None


def differing(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Paths of the options in which configurations differ, in the order in which they appear.

    Arguments of objects of differing classes are left out: the class says it.

    Example:
        >>> differing([{"a": "SGD", "a.momentum": 0.9, "b": 1, "c": 2}, {"a": "Adam", "b": 1, "c": 3}])
        ['a', 'c']
    """
    different = {path for one in options for path in apart(options[0], one)}
    found = [path for path in dict.fromkeys(path for one in options for path in one) if path in different]
    return [path for path in found if not any(path.startswith(f"{other}.") for other in found)]


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
        others = [f".{other}" for other in paths if other != path]
        fitting = (end for end in ends if not (end[0].isdigit() or any(one.endswith(f".{end}") for one in others)))
        found[path] = next(fitting, path)
    return found


def show(value: Any) -> str:
    """An option's value as in a config."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return "1.0" if value == 1 else f"{value:g}"
    return str(value)
