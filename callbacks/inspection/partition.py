"""Figure of the partition: the number of samples, of each class where there are classes, at each client."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np

from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.datamodules import partition_figure
from pfl_lightning.federation import Federation

__all__ = ["PartitionPicture"]


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
        groups: list[str] | None = data.client_groups
        if data.novel:
            novel = set(data.novel)
            known = groups or [""] * data.num_clients
            groups = [", ".join(filter(None, (own, "novel" * (k in novel)))) for k, own in enumerate(known)]
        counts, names = data.class_counts(), data.class_names
        if data.num_classes == 0:  # a regression, or items whose classes are not known
            counts = np.array([[len(data.client_data(client).train)] for client in range(data.num_clients)])
            names = ("all",)
        self.recorder.figure("partition", partition_figure(counts, names, groups), 0)
