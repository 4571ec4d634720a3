"""Options that a run was resumed with, where they make a result: it is then a configuration of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pfl_lightning.report.runs.files import read_json
from pfl_lightning.report.runs.options import PLACES, SETTINGS, changes_training, is_below

__all__ = ["resumed_rounds", "resumed_with"]

FIRST_CONFIG = "config.yaml"
"""The config that a run began with in its folder."""


def resumed_with(folder: Path) -> dict[str, str]:
    """What resumptions of a run have changed, as options of it: from which round, and the values before and then.

    Rounds, the engine, seeds and places of files are none: they are compared otherwise, or change nothing. Nor is the
    personalization of a run that went on in a folder of its own: the one of its config alone was done.

    Args:
        folder: The run's folder, with ``changes.json`` if it was resumed with other options.
    """
    found: dict[str, list[str]] = {}
    for change, from_round, config in _changes(folder):
        option, before, now = str(change.get("option")), change.get("before"), change.get("now")
        if config == FIRST_CONFIG and is_below(option, "personalize"):
            continue
        # A later version of the package may have added an option; files of earlier ones do not say.
        known = change.get("known", before is not None and now is not None)
        if changes_training(option, before, now) or (known and _makes_a_result(option)):
            text = f"{_short(before)} -> {_short(now)} from round {from_round}"
            found.setdefault(f"resumed.{option.replace('.init_args', '')}", []).append(text)
    return {option: ", ".join(texts) for option, texts in found.items()}


def resumed_rounds(folder: Path) -> int | None:
    """The rounds that the last resumption has asked for; ``None`` if none has asked for other rounds.

    Args:
        folder: The run's folder.
    """
    asked = [change.get("now") for change, *_ in _changes(folder) if change.get("option") == "trainer.max_epochs"]
    rounds = asked[-1] if asked else None
    return rounds if isinstance(rounds, int) and not isinstance(rounds, bool) else None


def _changes(folder: Path) -> Iterator[tuple[Mapping[str, Any], Any, Any]]:
    """What resumptions have changed, from which round, and the name of the resumption's config."""
    path = folder / "changes.json"
    entries = read_json(path, "what it was resumed with") if path.is_file() else ()
    for entry in entries if isinstance(entries, list) else ():
        changes = entry.get("changes") if isinstance(entry, Mapping) else None
        for change in changes if isinstance(changes, list) else ():
            if isinstance(change, Mapping):
                yield change, entry.get("from_round"), entry.get("config")


def _makes_a_result(option: str) -> bool:
    if option.rpartition(".")[2] in PLACES:
        return False
    return any(option == name or option.startswith(f"{name}.") for name in SETTINGS)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
