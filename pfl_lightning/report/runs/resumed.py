"""Options that a run was resumed with, where they make a result: it is then a configuration of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfl_lightning.report.runs.options import PLACES, SETTINGS

__all__ = ["resumed_with"]


def resumed_with(folder: Path) -> dict[str, str]:
    """What resumptions of a run have changed, as options of it: from which round, and the values before and then.

    Rounds, the engine, seeds and places of files are none: they are compared otherwise, or change nothing.

    Args:
        folder: The run's folder, with ``changes.json`` if it was resumed with other options.
    """
    try:
        entries = json.loads((folder / "changes.json").read_text())
    except (OSError, ValueError):  # none, or damaged
        return {}
    found: dict[str, list[str]] = {}
    for entry in entries if isinstance(entries, list) else ():
        changes = entry.get("changes") if isinstance(entry, Mapping) else None
        for change in changes if isinstance(changes, list) else ():
            option, values = str(change.get("option")), (change.get("before"), change.get("now"))
            if None not in values and _makes_a_result(option):  # else a later version may have added the option
                text = f"{_short(change.get('before'))} -> {_short(change.get('now'))} from round {entry['from_round']}"
                found.setdefault(f"resumed.{option.replace('.init_args', '')}", []).append(text)
    return {option: ", ".join(texts) for option, texts in found.items()}


def _makes_a_result(option: str) -> bool:
    if option.rpartition(".")[2] in PLACES:
        return False
    clips = option.startswith("model.engine.") and "gradient_clip" in option
    return clips or any(option == name or option.startswith(f"{name}.") for name in SETTINGS)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
