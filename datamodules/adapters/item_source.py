"""A user-defined data set with the settings of its loader: how it is collated, in which order, and who reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule

from pfl_lightning.datamodules.adapters.loading.orders import Order
from pfl_lightning.datamodules.adapters.loading.workers import By, Fetch, Workers, seeded_reads

__all__ = ["BatchSizes", "ItemSource"]


@dataclass(frozen=True)
class BatchSizes:
    """Settings of one client's loaders, where clients differ in them.

    Attributes:
        batch_size: Items in a training batch.
        eval_batch_size: Items in a validation or test batch.
        drop_last: Whether an incomplete last training batch is dropped.
    """

    batch_size: int
    eval_batch_size: int
    drop_last: bool


@dataclass(frozen=True)
class ItemSource:
    """Map-style data set with the collate function and order of its loader.

    Attributes:
        dataset: Map-style data set.
        collate: Function from a list of items to a batch.
        shuffled: True if training batches have a new random order every epoch.
        datamodule: Data module whose batch hooks an inner Trainer calls; None for no hooks.
        order: Order of a sampler or batch sampler of the user's; None for a plain one.
        workers: Processes that read the items; None to read them in this process.
        batches: Sizes of its loader's batches, for where several are combined; None if it has none of its own.
        evaluated: Whether it is for evaluations alone, which have the sizes of its own loader.
        loader: The client's own loader, where it is used as it is; None where the items are read by their places.
        by: What the data set is asked for, see :class:`~pfl_lightning.datamodules.adapters.loading.workers.Fetch`.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    shuffled: bool = True
    datamodule: LightningDataModule | None = None
    order: Order | None = None
    workers: Workers | None = None
    batches: BatchSizes | None = None
    evaluated: bool = False
    loader: Any = None
    by: By = "items"

    def read(
        self, batches: Sequence[list[int]], generator: torch.Generator | None, seeded: bool = False
    ) -> Iterator[Any]:
        """Collated batches of the items at the given places.

        Args:
            batches: Places of the items of each batch.
            generator: Its state gives the seeds of what transforms draw, where they are seeded for each batch.
            seeded: Whether they are in this process, too, for draws from Python and NumPy; in workers they always are.
        """
        if self.workers is not None:
            return self.workers.read(batches, generator)
        fetch = Fetch(self.dataset, self.collate, self.by)
        return seeded_reads(fetch, batches, generator) if seeded else map(fetch, batches)
