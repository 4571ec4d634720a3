"""A value of a study file: every error names its place there, what was expected, and what came."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_lightning.errors import UsageError
from pfl_lightning.names import did_you_mean
from pfl_lightning.study.definition.options import Config, read_yaml, short_path

__all__ = ["Entry"]

NUMBER_OR_SHARE = frozenset({"cohort", "eval_cohort", "novel_clients"})
"""Options that are a number of clients, or a share of them."""


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

    def at(self, key: str, value: Any) -> Entry:
        """The entry of a key."""
        separator = ": " if self.place.endswith((".yaml", ".yml")) else "."
        return Entry(f"{self.place}{separator}{key}", value, self.folder)

    def error(self, expected: str) -> UsageError:
        """The error that something else was expected here."""
        text = str(self.value)
        quoted = isinstance(self.value, str) and expected.startswith(("a number", "a whole number"))
        kind = " (a text: write it without quotes)" if quoted and isinstance(_number(text), float) else ""
        return UsageError(f"{self.place}: expected {expected}, got {text[:80]}{' ...' * (len(text) > 80)}{kind}")

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

    def integer(self, at_least: int = 0) -> int:
        """A whole number."""
        return int(self.of(int, f"a whole number of at least {at_least}", lambda value: value >= at_least))

    def text(self) -> str:
        """A text."""
        return str(self.of(str, "a text"))

    def one_of(self, choices: tuple[str, ...]) -> str:
        """One of some words."""
        if self.value not in choices:
            raise self.error(f"one of {', '.join(choices)}{did_you_mean(str(self.value), choices)}")
        return str(self.value)

    def mapping(self, known: Iterable[str] | None = None, expected: str = "a mapping") -> dict[str, Entry]:
        """Entries by key; of a mapping whose keys are known, no others."""
        if not isinstance(self.value, Mapping):
            raise self.error(expected)
        entries: dict[str, Entry] = {}
        for key, value in self.value.items():
            if str(key) in entries:  # such as 1 and "1"
                raise UsageError(f"{self.place}: the name {str(key)!r} is given twice: keep one of them")
            if known is not None and key not in known:
                near = did_you_mean(str(key), known)
                raise UsageError(f"{self.place}: unknown key {str(key)!r}{near} (known are {', '.join(known)})")
            entries[str(key)] = self.at(str(key), value)
        return entries

    def options(self, expected: str = "a mapping") -> dict[str, Entry]:
        """Entries by path of option; one that stands there with and without ``init_args`` is refused."""
        entries, seen = self.mapping(expected=expected), dict[str, str]()
        for path in entries:
            if (other := seen.setdefault(short_path(path), path)) != path:
                raise UsageError(f"{self.place}: {other} and {path} are one option: keep one of them")
        return entries

    def entries(self, expected: str) -> list[Entry]:
        """Entries of a list that is not empty."""
        return [self.at(str(number), value) for number, value in enumerate(self.of(list, expected, bool))]

    def names(self) -> tuple[str, ...]:
        """A list of different names."""
        found = tuple(entry.text() for entry in self.entries("a list of names"))
        self._refuse_equal(found, "names")
        return found

    def seeds(self) -> tuple[int, ...]:
        """A list of different seeds."""
        found = tuple(entry.integer() for entry in self.entries("a list of whole numbers"))
        self._refuse_equal(found, "seeds")
        if max(found) >= 2**32:  # more than numpy takes
            raise self.error("seeds below 2^32")
        return found

    def values(self) -> tuple[Any, ...]:
        """A list of values of an option, different as it reads them: 1, 1.0 and "1" are one, but for clients.

        Of these, 1 is one and 1.0 the share of all.
        """
        found = tuple(entry.value for entry in self.entries("a list of values"))
        of_clients = not NUMBER_OR_SHARE.isdisjoint(self.place.split("."))
        as_read = (value if of_clients and isinstance(value, int) else _number(value) for value in found)
        self._refuse_equal([repr(value) for value in as_read], "values")
        return found

    def _refuse_equal(self, found: Sequence[Any], what: str) -> None:
        if len(set(found)) < len(found):
            raise self.error(f"different {what}")

    def config(self) -> Config:
        """A config: a mapping, or the path of a file, relative to the study file."""
        content = {} if self.value is None else self.value
        if isinstance(content, str):
            path = self.folder / content
            if content.isidentifier() and not path.exists():  # no file, but a class
                raise self.error(f"a config, such as {_of_method(content)}, or the path of a YAML file")
            content = read_yaml(path, self.place)
            if not isinstance(content, Mapping):
                raise UsageError(f"{self.place}: {path} is no config: it holds no mapping")
        if not isinstance(content, Mapping):
            raise self.error("a config: a mapping, or the path of a YAML file")
        if "class_path" in content or "init_args" in content:  # that of a class, which does not say what the class is
            raise self.error(f"a config with keys such as model, data and trainer, as in {_of_method('FedAvg')}")
        return dict(content)

    def configs(self) -> tuple[Config, ...]:
        """A config, or a list of some."""
        several = isinstance(self.value, list)
        return tuple(one.config() for one in (self.entries("configs") if several else [self]))


def _number(value: Any) -> Any:
    """A value as a number, if it may be read as one."""
    try:
        return value if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)


def _of_method(name: str) -> str:
    return f"{{model: {{method: {{class_path: {name}}}}}}}"
