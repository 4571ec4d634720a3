"""Components of the training loss, by client."""

from __future__ import annotations

import lightning as L
import numpy as np

from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.federation import Federation
from pfl_lightning.federation.loop import RoundLoop

__all__ = ["LossComponents"]

BINS = 20


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
        loop = next(one for one in trainer.callbacks if isinstance(one, RoundLoop))  # type: ignore[attr-defined]
        losses = [result.losses for result in loop.results if result.error is None]
        for name in sorted({name for own in losses for name in own}):
            values = np.array([own[name] for own in losses if name in own])
            values = values[np.isfinite(values)]
            if len(values):
                edges = np.histogram_bin_edges(values, BINS)
                self.recorder.histogram(f"clients/train_{name}", values.tolist(), edges, round)
