"""Values of all clients: samples by class, accuracies, components of the training loss, and logged values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import lightning as L
import numpy as np

from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.callbacks.inspection.figures import new_figure, thin_ticks
from pfl_lightning.callbacks.results import results_writer
from pfl_lightning.datamodules import partition_figure
from pfl_lightning.federation import Federation
from pfl_lightning.federation.loop import loop_of
from pfl_lightning.metrics import summarize
from pfl_lightning.runs.curves import draw_clients, read_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure


EDGES = np.linspace(0.0, 1.0, 21)
BINS = 20
TAKEN = ("val_accuracy", "test_accuracy")
"""Names whose histograms are those of ``ClientAccuracy``."""


class PartitionPicture(InspectionCallback):
    """Heat map of the training samples by client and class, as by ``pfl partition``, once at the start of the run.

    Without classes it shows how many samples each client has.

    Novel clients, which never train, are marked.

    Args:
        dirpath: See :class:`InspectionCallback`.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        super().__init__(dirpath=dirpath)

    def before_fit(self, trainer: L.Trainer, federation: Federation) -> None:
        """Draw the heat map, unless the run continues from a checkpoint, whose run already has it."""
        if trainer.current_epoch > 0:
            return
        data: Any = federation.data
        groups: list[str] | None = data.client_groups or [*(getattr(data, "client_names", None) or ())] or None
        if data.novel:
            novel = set(data.novel)
            known = groups or [""] * data.num_clients
            groups = [", ".join(filter(None, (own, "novel" * (k in novel)))) for k, own in enumerate(known)]
        counts, names = data.class_counts(), data.class_names
        if data.num_classes == 0:  # a regression, or items whose classes are not known
            counts = np.array([[len(data.client_data(client).train)] for client in range(data.num_clients)])
            names = ("all",)
        self.recorder.figure("partition", partition_figure(counts, names, groups), 0)


def _accuracy_charts(split: str, prefix: str) -> dict[str, list[Any]]:
    """Charts of a split: the mean with its band, and the mean, worst decile, worst and best client."""
    band = [f"{prefix}accuracy/{end}" for end in ("mean", "lower", "upper")]
    return {
        f"{split}: mean ± standard deviation over clients": ["Margin", band],
        f"{split}: mean, worst decile, worst and best client": [
            "Multiline",
            [f"{prefix}accuracy/(mean|worst_decile|worst|best)"],
        ],
    }


class ClientAccuracy(InspectionCallback):
    """Accuracy over clients: a band of one standard deviation around the mean, and a histogram.

    Every evaluation logs the scalars ``val_accuracy/lower`` and ``val_accuracy/upper`` (mean minus and plus the
    deviation, within [0, 1]), in addition to ``val_accuracy/mean`` and ``val_accuracy/worst_decile``, which are always
    logged. The same applies to ``test_accuracy/*``, and to ``novel_*`` if novel clients are evaluated. Every
    ``every_n_rounds`` rounds there is a histogram over the evaluated clients, ``clients/val_accuracy`` and
    ``clients/test_accuracy``, and with a :class:`~pfl_lightning.callbacks.ResultsWriter` a picture of every client's
    curve, ``clients/curves``.

    Args:
        every_n_rounds: Rounds between two histograms.
        dirpath: See :class:`InspectionCallback`.
    """

    of_evaluations = True
    charts: ClassVar = {"accuracy": _accuracy_charts("validation", "val_") | _accuracy_charts("test", "test_")}

    def after_evaluation(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Log the band."""
        values: dict[str, float] = {}
        for name, scores in self._groups(federation):
            summary = summarize(scores)
            values[f"{name}/lower"] = max(0.0, summary.mean - summary.std)
            values[f"{name}/upper"] = min(1.0, summary.mean + summary.std)
        self.recorder.scalars(values, round)

    def show(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Log the histograms."""
        for name, scores in self._groups(federation):
            self.recorder.histogram(f"clients/{name}", list(scores.values()), EDGES, round)
        writer = results_writer(trainer)
        rows = [] if writer is None else read_curves(writer.folder(trainer))
        figure = new_figure(6, 4)
        if draw_clients(figure.subplots(), rows) or draw_clients(figure.gca(), rows, "validation"):
            self.recorder.figure("clients/curves", figure, round)

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


class LossComponents(InspectionCallback):
    """Components of the training loss (cross entropy, contrastive, alignment, proximal, ...), by client.

    :class:`~pfl_lightning.callbacks.FederatedLoop` always logs the means over the cohort, ``train/<component>``;
    TensorBoard shows them in one chart (Custom Scalars). Every ``every_n_rounds`` rounds there is a histogram of each
    component over the clients of the cohort, ``clients/train_<component>``, without clients whose training failed.

    Args:
        every_n_rounds: Rounds between two histograms.
        dirpath: See :class:`InspectionCallback`.
    """

    def show(self, trainer: L.Trainer, federation: Federation, round: int) -> None:
        """Log the histograms."""
        loop = loop_of(trainer)
        losses = [result.losses for result in loop.results if result.error is None]
        for name in sorted({name for own in losses for name in own}):
            values = np.array([own[name] for own in losses if name in own])
            values = values[np.isfinite(values)]
            if len(values):
                edges = np.histogram_bin_edges(values, BINS)
                self.recorder.histogram(f"clients/train_{name}", values.tolist(), edges, round)


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
        for scores in (federation.validation_scores, federation.test_scores):
            for name in sorted({name for score in scores.values() for name in score.logged}):
                values = {client: s.logged[name] for client, s in sorted(scores.items()) if name in s.logged}
                tag = f"logged_{name}" if name in TAKEN else name
                self.recorder.figure(f"clients/{tag}", bars(values, name, round), round)


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
