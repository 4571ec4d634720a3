"""What ``results.json`` is made of: chosen rounds, and the rounds one after the other."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pfl_lightning.metrics import EvalMetrics, summarize

__all__ = ["ChosenRound", "HistoryEntry", "accuracies", "as_text", "from_first_format", "mean_of", "summary_of"]


def accuracies(scores: Mapping[int, EvalMetrics]) -> dict[int, float]:
    """Every client's accuracy; not of models that have none, such as those of a regression."""
    return {client: score.accuracy for client, score in scores.items() if not math.isnan(score.accuracy)}


def as_text(content: Mapping[str, Any]) -> str:
    """A file's text; JSON has no NaN, so that none may be in it."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def mean_of(values: Mapping[int, float]) -> float:
    """Mean over clients of their accuracies; at least one."""
    return summarize(list(values), list(values.values())).mean


def summary_of(values: Mapping[int, float]) -> dict[str, float | int] | None:
    """Mean, spread and extremes of accuracies over clients; ``None`` without clients."""
    if not values:
        return None
    found = summarize(list(values), list(values.values()))
    return {**found.as_dict(), "variance": found.std**2, "num_clients": len(values)}


@dataclass
class ChosenRound:
    """A round that was chosen by some rule, and every client's accuracies in it.

    Attributes:
        round: Its number, from 1.
        criterion: What the rule has compared.
        validation: Accuracies on the validation parts, by client.
        test: Accuracies on the test parts, by client.
    """

    round: int
    criterion: float
    validation: dict[int, float]
    test: dict[int, float]

    def as_dict(self) -> dict[str, Any]:
        """The form of ``results.json``."""
        return {"round": self.round, "test": summary_of(self.test), "validation": summary_of(self.validation)}


@dataclass(frozen=True)
class HistoryEntry:
    """A round that was played; seconds and bytes are those since the entry before.

    Attributes:
        round: Its number, from 1.
        clients: How many clients were evaluated after it; 0 for none.
        seconds: Wall time without the evaluation; ``None`` where it is not known, as in runs of earlier versions.
        bytes_up: Bytes that the clients uploaded; likewise.
        bytes_down: Bytes that the server sent; likewise.
        loss: Mean training loss over the clients of the round.
        test: Mean test accuracy over the evaluated clients.
        validation: Mean validation accuracy over the evaluated clients.
    """

    round: int
    clients: int
    seconds: float | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    loss: float | None = None
    test: float | None = None
    validation: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The form of ``results.json``."""
        parts = {"test": self.test, "validation": self.validation}
        return {**asdict(self), **{part: None if mean is None else {"accuracy": mean} for part, mean in parts.items()}}


def from_first_format(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Chosen rounds and history in a checkpoint of a version whose rounds counted from 0."""
    chosen = {name: {**entry, "round": entry["round"] + 1} for name, entry in state["chosen"].items()}
    history = [
        {
            "round": int(entry["round"]) + 1,
            "clients": int(entry["clients"]),
            "test": entry.get("test_accuracy"),
            "validation": entry.get("accuracy"),
        }
        for entry in state["history"]
    ]
    return chosen, history
