"""Reader of what a study file searches, and of options with their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pfl_lightning.errors import UsageError
from pfl_lightning.study.definition.entry import Entry
from pfl_lightning.study.definition.options import short_path
from pfl_lightning.study.definition.study import Dimension, Search

__all__ = ["read_search", "refuse_same_option"]


def read_search(entry: Entry) -> Search:
    """The search of a study.

    Args:
        entry: What stands under ``search``.

    Raises:
        UsageError: What is wrong, with its place in the file.
    """
    entries = entry.mapping(("trials", "space", "methods", "seed", "prune"))
    own = _own_spaces(entries["methods"]) if "methods" in entries else {}
    for key in ("trials",) if own else ("trials", "space"):
        if key not in entries:
            raise UsageError(f"{entry.place}: {key} is missing")
    space = _space(entries["space"]) if "space" in entries else {}
    for method, options in own.items():
        if not options and not space:
            raise entries["methods"].at(method, options).error("at least one option with its values")
    if not space and not own:
        raise entries["space"].error("at least one option with its values")
    methods = tuple(own) if own else entries["methods"].names() if "methods" in entries else ()
    return Search(
        trials=entries["trials"].integer(at_least=1),
        space=space,
        methods=methods,
        own=own,
        seed=entries["seed"].integer() if "seed" in entries else 0,
        prune=entries["prune"].flag() if "prune" in entries else True,
    )


def _own_spaces(entry: Entry) -> dict[str, dict[str, Dimension]]:
    """Options of single methods, where the methods that are searched are a mapping rather than a list of names."""
    if not isinstance(entry.value, Mapping):
        return {}
    found = {method: {} if one.value is None else _space(one) for method, one in entry.mapping().items()}
    if not found:
        raise entry.error("names of methods, as a list or with the options that are searched of each")
    return found


def _space(entry: Entry) -> dict[str, Dimension]:
    dimensions = entry.mapping()
    refuse_same_option(entry, dimensions)
    return {path: _dimension(one) for path, one in dimensions.items()}


def refuse_same_option(entry: Entry, paths: Iterable[str]) -> None:
    """Refuse an option that stands there with and without ``init_args``: of two values only one would count.

    Args:
        entry: Where the options stand.
        paths: The options.

    Raises:
        UsageError: Two are the same option.
    """
    seen: dict[str, str] = {}
    for path in paths:
        other = seen.setdefault(short_path(path), path)
        if other != path:
            raise UsageError(f"{entry.place}: {other} and {path} are one option: keep one of them")


def _dimension(entry: Entry) -> Dimension:
    entries = entry.mapping(("choices", "low", "high", "log"), "{choices: [...]} or {low: ..., high: ..., log: true}")
    if "choices" in entries:
        if len(entries) > 1:
            raise entry.error("either choices, or low and high")
        return Dimension(choices=entries["choices"].different_values())
    if not {"low", "high"} <= set(entries):
        raise entry.error("choices, or low and high")
    low, high = entries["low"].number(), entries["high"].number()
    log = entries["log"].flag() if "log" in entries else False
    if low >= high or (log and low <= 0):
        raise entry.error("low below high, both above 0 on a logarithmic scale")
    return Dimension(low=low, high=high, log=log, integer=isinstance(low, int) and isinstance(high, int))
