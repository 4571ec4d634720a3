"""Communication cost of a run, and its accuracy against the cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import lightning as L
import numpy as np

from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.callbacks.inspection.figures import new_figure
from pfl_lightning.federation import Federation
from pfl_lightning.federation.loop import loop_of
from pfl_lightning.metrics import summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Communication(InspectionCallback):
    """Communication cost in bytes, and accuracy against it.

    :class:`~pfl_lightning.callbacks.FederatedLoop` always logs the cumulative ``bytes/up_<kind>`` and
    ``bytes/down_<kind>``. This callback adds ``bytes/up``, ``bytes/down`` and ``bytes/total`` in every round. Every
    ``every_n_rounds`` rounds, it draws the mean test accuracy against all bytes so far, since methods whose messages
    differ in size cannot be compared by rounds. The curve continues after a resume.

    Args:
        every_n_rounds: Rounds between two figures.
        dirpath: See :class:`InspectionCallback`.
    """

    charts: ClassVar = {
        "communication": {
            "bytes so far": ["Multiline", ["bytes/(up|down|total)"]],
            "bytes so far, by kind": ["Multiline", ["bytes/(up|down)_.*"]],
        }
    }

    def __init__(self, every_n_rounds: int = 10, dirpath: str | None = None) -> None:
        super().__init__(every_n_rounds, dirpath)
        self.history: list[dict[str, Any]] = []  # round, bytes up and down so far, mean accuracy or None
        self._loaded = False

    def before_fit(self, trainer: L.Trainer, federation: Federation) -> None:
        """Clear the history, unless it comes from a checkpoint, or an earlier fit that goes on."""
        if not self._loaded and not trainer.current_epoch:
            self.history = []
        self._loaded = False

    # After the evaluation, so that a checkpoint of the best round, which is written then, has the round in it.
    def after_evaluation(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Record the accuracy."""
        scores = federation.test_scores or federation.validation_scores
        novel = set(federation.data.novel)
        known = {client: score.accuracy for client, score in scores.items() if not math.isnan(score.accuracy)}
        own = {client: accuracy for client, accuracy in known.items() if client not in novel}
        self._note(trainer, round, summarize(own).mean if own else None)

    def after_round(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Log the totals."""
        if not self.history or self.history[-1]["round"] != round:
            self._note(trainer, round, None)
        up, down = float(self.history[-1]["up"]), float(self.history[-1]["down"])
        self.recorder.scalars({"bytes/up": up, "bytes/down": down, "bytes/total": up + down}, round)

    def _note(self, trainer: L.Trainer, round: int, accuracy: float | None) -> None:
        loop = loop_of(trainer)
        up, down = sum(loop.traffic.up.values()), sum(loop.traffic.down.values())
        self.history = [point for point in self.history if point["round"] < round]
        self.history.append({"round": round, "up": up, "down": down, "accuracy": accuracy})

    def show(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Draw accuracy against bytes, once there is any."""
        if any(point["accuracy"] is not None for point in self.history):
            neighbors = federation.clients.models[0].uses_knn_evaluation()
            score = "nearest-neighbor score" if neighbors else "accuracy"
            figure = draw_accuracy_by_bytes(self.history, federation.method_name, score)
            self.recorder.figure("accuracy_by_bytes", figure, round)

    def state_dict(self) -> dict[str, Any]:
        """History for the checkpoint."""
        return {"history": [dict(point) for point in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the history from a checkpoint."""
        self.history, self._loaded = list(state_dict["history"]), True


def draw_accuracy_by_bytes(history: list[dict[str, Any]], name: str, score: str = "accuracy") -> Figure:
    """Plot of the accuracy, or of another score, against the bytes up, down and in total."""
    points = [point for point in history if point["accuracy"] is not None]
    accuracy = [100 * point["accuracy"] for point in points]
    sizes = {way: [point[way] for point in points] for way in ("up", "down")}
    sizes["up and down"] = [point["up"] + point["down"] for point in points]
    largest = max(max(sizes["up and down"]), 1)
    power = min(int(np.log10(largest)) // 3, 4)
    figure = new_figure(6, 4)
    axes = figure.add_subplot()
    for label, values in sizes.items():
        axes.plot([value / 1000**power for value in values], accuracy, marker=".", label=label)
    unit = ("bytes", "kB", "MB", "GB", "TB")[power]
    axes.set(xlabel=f"{unit} so far", ylabel="mean over clients, %", title=f"{name}: {score} by bytes")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
