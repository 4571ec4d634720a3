"""Values that a user's module logs in its evaluation, over clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import lightning as L
import numpy as np

from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.callbacks.inspection.drawing.figures import new_figure, thin_ticks
from pfl_lightning.federation import Federation

TAKEN = ("val_accuracy", "test_accuracy")
"""Names whose histograms are those of ``ClientAccuracy``."""

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ClientMetrics"]


class ClientMetrics(InspectionCallback):
    """Values that a user's module logs in its validation or test step, one bar for each client: errors of a regression.

    Every ``every_n_rounds`` rounds there is a picture of each value, ``clients/<name>``. Those of ``val_accuracy`` and
    ``test_accuracy`` are ``clients/logged_val_accuracy`` and ``clients/logged_test_accuracy``: without ``logged_`` they
    are those of :class:`ClientAccuracy`. Clients of the package's own methods log none.

    Args:
        every_n_rounds: Rounds between two pictures.
        dirpath: See :class:`InspectionCallback`.
    """

    of_evaluations = True

    def show(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Draw the bars."""
        for name, values in self._values(federation):
            tag = f"logged_{name}" if name in TAKEN else name
            self.recorder.figure(f"clients/{tag}", bars(values, name, round), round)

    @staticmethod
    def _values(federation: Federation) -> Iterator[tuple[str, dict[int, float]]]:
        """Yield the name of each logged value, and the value by client."""
        for scores in (federation.validation_scores, federation.test_scores):
            for name in sorted({name for score in scores.values() for name in score.logged}):
                yield name, {client: s.logged[name] for client, s in sorted(scores.items()) if name in s.logged}


def bars(values: dict[int, float], name: str, round: int) -> Figure:
    """A bar for each client, and a line at their mean.

    Args:
        values: A value of each client; one that is not finite has no bar.
        name: Name of the value.
        round: Round after which the clients were evaluated.
    """
    clients, heights = list(values), np.array(list(values.values()), dtype=np.float64)
    figure = new_figure(float(np.clip(2.0 + 0.3 * len(clients), 5, 14)), 3.5)
    axes = figure.add_subplot()
    known = np.isfinite(heights)
    axes.bar(np.flatnonzero(known), heights[known], color="tab:blue")
    if known.any():
        axes.axhline(float(heights[known].mean()), color="black", linewidth=1, label="mean over clients")
        axes.legend()
    thin_ticks(axes, "x", [str(client) for client in clients])
    axes.set(xlabel="client", ylabel=name, title=f"{name}, round {round + 1}")
    return figure
