"""A value of a study file that knows its place there, so that every error names it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_lightning.errors import UsageError
from pfl_lightning.study.definition.options import Config
from pfl_lightning.study.definition.yaml_file import read_yaml
from pfl_lightning.text import did_you_mean

__all__ = ["Entry"]


_NUMBER_OR_SHARE = frozenset({"cohort", "eval_cohort", "novel_clients"})
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
        wants_number = expected.startswith(("a number", "a whole number"))
        quoted = wants_number and isinstance(self.value, str) and _is_number(text)
        kind = " (a text: write it without quotes)" if quoted else ""
        return UsageError(f"{self.place}: expected {expected}, got {text[:80]}{' ...' * (len(text) > 80)}{kind}")

    def mapping(self, known: Iterable[str] | None = None, expected: str = "a mapping") -> dict[str, Entry]:
        """Entries by key; of a mapping whose keys are known, no others."""
        if not isinstance(self.value, Mapping):
            raise self.error(expected)
        entries: dict[str, Entry] = {}
        for key, value in self.value.items():
            if str(key) in entries:  # such as 1 and "1"
                raise UsageError(f"{self.place}: the name {str(key)!r} is given twice: keep one of them")
            entries[str(key)] = self.at(str(key), value)
        for key in entries:
            if known is not None and key not in known:
                raise UsageError(
                    f"{self.place}: unknown key {key!r}{did_you_mean(key, known)} (known are {', '.join(known)})"
                )
        return entries

    def entries(self, expected: str) -> list[Entry]:
        """Entries of a list that is not empty."""
        if not isinstance(self.value, list) or not self.value:
            raise self.error(expected)
        return [self.at(str(number), value) for number, value in enumerate(self.value)]

    def different_values(self) -> tuple[Any, ...]:
        """A list of different values."""
        found = tuple(entry.value for entry in self.entries("a list of values"))
        clients = not _NUMBER_OR_SHARE.isdisjoint(self.place.split("."))
        if len({_as_read(value, clients) for value in found}) < len(found):
            raise self.error("different values")
        return found

    def number(self, kind: str = "a number") -> float:
        """A whole number or a fraction, not NaN nor infinite."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not math.isfinite(self.value):
            raise self.error(kind)
        return self.value

    def integer(self, at_least: int = 0) -> int:
        """A whole number."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < at_least:
            raise self.error(f"a whole number of at least {at_least}")
        return self.value

    def text(self) -> str:
        """A text."""
        if not isinstance(self.value, str):
            raise self.error("a text")
        return self.value

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.error("true or false")
        return self.value

    def one_of(self, choices: tuple[str, ...]) -> str:
        """One of some words."""
        if self.value not in choices:
            raise self.error(f"one of {', '.join(choices)}{did_you_mean(str(self.value), choices)}")
        return str(self.value)

    def names(self) -> tuple[str, ...]:
        """A list of different names."""
        found = tuple(entry.text() for entry in self.entries("a list of names"))
        if len(set(found)) < len(found):
            raise self.error("different names")
        return found

    def config(self) -> Config:
        """A config: a mapping, or the path of a file, relative to the study file."""
        if isinstance(self.value, Mapping):
            return self._with_sections(self.value)
        if self.value is None:
            return {}
        if not isinstance(self.value, str):
            raise self.error("a config: a mapping, or the path of a YAML file")
        path = self.folder / self.value
        if self.value.isidentifier() and not path.exists():  # no file, but a class
            raise self.error(f"a config, such as {_of_method(self.value)}, or the path of a YAML file")
        content = read_yaml(path, self.place)
        if not isinstance(content, Mapping):
            raise UsageError(f"{self.place}: {path} is no config: it holds no mapping")
        return self._with_sections(content)

    def _with_sections(self, config: Config) -> Config:
        """A config, refused if it is that of a class, which does not say what the class is."""
        if "class_path" in config or "init_args" in config:
            raise self.error(f"a config with keys such as model, data and trainer, as in {_of_method('FedAvg')}")
        return dict(config)

    def configs(self) -> tuple[Config, ...]:
        """A config, or a list of some."""
        if isinstance(self.value, list):
            return tuple(entry.config() for entry in self.entries("configs"))
        return (self.config(),)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _as_read(value: Any, clients: bool) -> str:
    """A value as an option reads it: 1, 1.0 and "1" are one number, which would make equal rows.

    Args:
        value: The value.
        clients: Whether it is of clients: 1 is one of them then, and 1.0 the share of all.
    """
    if clients and isinstance(value, int):
        return str(value)
    try:
        return str(value) if isinstance(value, bool) else repr(float(value))
    except (TypeError, ValueError, OverflowError):
        return str(value)


def _of_method(name: str) -> str:
    return f"{{model: {{method: {{class_path: {name}}}}}}}"
