"""Distribution of the accuracy over clients."""

from __future__ import annotations

import math
from collections.abc import Iterator

import lightning as L
import numpy as np

from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.callbacks.inspection.drawing.charts import Chart
from pfl_lightning.federation import Federation
from pfl_lightning.metrics import summarize

__all__ = ["ClientAccuracy"]

EDGES = np.linspace(0.0, 1.0, 21)
SPLITS = {"val_": "validation", "test_": "test"}


class ClientAccuracy(InspectionCallback):
    """Accuracy over clients: a band of one standard deviation around the mean, and a histogram.

    Every evaluation logs the scalars ``val_accuracy/lower`` and ``val_accuracy/upper`` (mean minus and plus the
    deviation, within [0, 1]), in addition to ``val_accuracy/mean`` and ``val_accuracy/worst_decile``, which are always
    logged. The same applies to ``test_accuracy/*``, and to ``novel_*`` if novel clients are evaluated. Every
    ``every_n_rounds`` rounds there is a histogram over the evaluated clients, ``clients/val_accuracy`` and
    ``clients/test_accuracy``.

    Args:
        every_n_rounds: Rounds between two histograms.
        dirpath: See :class:`InspectionCallback`.
    """

    of_evaluations = True

    def charts(self, federation: Federation) -> tuple[Chart, ...]:
        """Charts of each split: the mean with its band, and the mean, worst decile, worst and best client."""
        found = []
        for prefix, split in SPLITS.items():
            name = f"{prefix}accuracy"
            band = (f"{name}/mean", f"{name}/lower", f"{name}/upper")
            found.append(Chart("accuracy", f"{split}: mean ± standard deviation over clients", band, band=True))
            spread = f"{name}/(mean|worst_decile|worst|best)"
            found.append(Chart("accuracy", f"{split}: mean, worst decile, worst and best client", (spread,)))
        return tuple(found)

    def after_evaluation(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Log the band."""
        values: dict[str, float] = {}
        for name, scores in self._groups(federation):
            summary = summarize(list(scores), list(scores.values()))
            values[f"{name}/lower"] = max(0.0, summary.mean - summary.std)
            values[f"{name}/upper"] = min(1.0, summary.mean + summary.std)
        self.recorder.scalars(values, round)

    def show(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Log the histograms."""
        for name, scores in self._groups(federation):
            self.recorder.histogram(f"clients/{name}", list(scores.values()), EDGES, round)

    @staticmethod
    def _groups(federation: Federation) -> Iterator[tuple[str, dict[int, float]]]:
        """Yield the name and accuracies by client of each evaluated split, novel clients separately.

        A model without an accuracy (NaN), such as that of a regression, is left out.
        """
        novel = set(federation.data.novel)
        for prefix, scores in (("val_", federation.validation_scores), ("test_", federation.test_scores)):
            for group, wanted in (("", False), ("novel_", True)):
                known = {client: score.accuracy for client, score in scores.items() if not math.isnan(score.accuracy)}
                own = {client: accuracy for client, accuracy in known.items() if (client in novel) == wanted}
                if own:
                    yield f"{group}{prefix}accuracy", own
