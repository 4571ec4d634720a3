"""Communication cost of a run, and its accuracy against the cost."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import lightning as L
import numpy as np

from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.callbacks.inspection.figures import new_figure
from pfl_lightning.callbacks.results import results_writer
from pfl_lightning.federation import Federation
from pfl_lightning.federation.loop import loop_of
from pfl_lightning.notices import shown_before
from pfl_lightning.runs.results import HistoryEntry

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Communication(InspectionCallback):
    """Communication cost in bytes, and accuracy against it.

    :class:`~pfl_lightning.callbacks.FederatedLoop` always logs the cumulative ``bytes/up_<kind>`` and
    ``bytes/down_<kind>``. This callback adds ``bytes/up``, ``bytes/down`` and ``bytes/total`` in every round. Every
    ``every_n_rounds`` rounds, with a :class:`~pfl_lightning.callbacks.ResultsWriter`, it draws the mean test accuracy
    against all bytes so far, since methods whose messages differ in size cannot be compared by rounds.

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

    def after_round(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Log the totals."""
        traffic = loop_of(trainer).traffic
        up, down = (float(sum(way.values())) for way in (traffic.up, traffic.down))
        self.recorder.scalars({"bytes/up": up, "bytes/down": down, "bytes/total": up + down}, round)

    def show(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Draw accuracy against bytes, once there is any."""
        writer = results_writer(trainer)
        if writer is None and not shown_before("communication"):
            warnings.warn("no picture of accuracy by bytes: add a ResultsWriter to the callbacks", stacklevel=2)
        if writer is not None and writer.chosen:
            neighbors = federation.clients.models[0].uses_knn_evaluation()
            score = "nearest-neighbor score" if neighbors else "accuracy"
            figure = draw_accuracy_by_bytes(writer.history, federation.method_name, score)
            self.recorder.figure("accuracy_by_bytes", figure, round)


def draw_accuracy_by_bytes(history: Sequence[HistoryEntry], name: str, score: str = "accuracy") -> Figure:
    """Plot of the mean test or else validation accuracy, or of another score, against the bytes up, down and in total.

    Args:
        history: The rounds, in order.
        name: Title of the plot.
        score: What is called accuracy.
    """
    means = [entry.validation if entry.test is None else entry.test for entry in history]
    known = [place for place, mean in enumerate(means) if mean is not None]
    accuracy = 100 * np.array(means, dtype=np.float64)[known]
    sizes = {
        "up": np.cumsum([entry.bytes_up or 0 for entry in history])[known],
        "down": np.cumsum([entry.bytes_down or 0 for entry in history])[known],
    }
    sizes["up and down"] = sizes["up"] + sizes["down"]
    largest = max(sizes["up and down"].max(), 1)
    power = min(int(np.log10(largest)) // 3, 4)
    figure = new_figure(6, 4)
    axes = figure.add_subplot()
    for label, values in sizes.items():
        axes.plot(values / 1000**power, accuracy, marker=".", label=label)
    unit = ("bytes", "kB", "MB", "GB", "TB")[power]
    axes.set(xlabel=f"{unit} so far", ylabel="mean over clients, %", title=f"{name}: {score} by bytes")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
