"""Figure of the partition: the number of samples of each class at each client."""

from __future__ import annotations

from typing import Any

import lightning as L

from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.datamodules import partition_figure
from pfl_lightning.federation import Federation

__all__ = ["PartitionPicture"]


class PartitionPicture(InspectionCallback):
    """Heat map of the training samples by client and class, as by ``pfl partition``, once at the start of the run.

    Novel clients, which never train, are marked.

    Args:
        dirpath: See :class:`InspectionCallback`.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        super().__init__(dirpath=dirpath)

    def unavailable(self, trainer: L.Trainer, federation: Federation) -> str | None:
        """Reason if the data have no classes; else None."""
        return None if federation.data.num_classes > 0 else "the data have no classes"

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
        self.recorder.figure("partition", partition_figure(data.class_counts(), data.class_names, groups), 0)
