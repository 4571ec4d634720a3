"""Data that clients bring: each as a data module, and the rule that leaves them as they are."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pfl_lightning.datamodules.adapters.loading.stages import GivenLoaders
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.base import Partitioner
from pfl_lightning.older_package import as_lightning

__all__ = ["AsGiven", "as_datamodule"]


class AsGiven(Partitioner):
    """The clients' samples as they are given; there is no rule."""

    needs_labels = False
    fixed_train = fixed_test = True

    def __init__(self, num_clients: int) -> None:
        super().__init__(num_clients)
        self.train: list[Ints] = []
        self.validation: list[Ints] = []
        self.test: list[Ints] = []

    def partition(self, labels: npt.NDArray[Any]) -> list[Ints]:
        """The training samples."""
        return self.train

    def partition_test(self, *args: Any, **kwargs: Any) -> list[Ints]:
        """The test samples."""
        return self.test

    def fixed_validation(self) -> list[Ints]:
        """The samples that are held out."""
        return self.validation


def as_datamodule(silo: Any, client: int, batch_size: int) -> LightningDataModule:
    """The data of one client as a data module.

    Args:
        silo: A LightningDataModule, a DataLoader or a Dataset.
        client: Number of the client.
        batch_size: Items in a batch of a Dataset.

    Raises:
        ValueError: It is none of these.
    """
    if isinstance(silo, FederatedDataModule):
        raise ValueError(
            f"silo {client} is a {type(silo).__name__}, which is divided among clients itself: give one "
            "LightningDataModule, DataLoader or Dataset a client"
        )
    silo = as_lightning(silo)  # which may be of pytorch_lightning
    if isinstance(silo, LightningDataModule):
        return silo
    if isinstance(silo, DataLoader):
        return GivenLoaders(silo)
    if isinstance(silo, IterableDataset):
        return GivenLoaders(DataLoader(silo, batch_size))
    if isinstance(silo, list | tuple) and silo and all(isinstance(part, DataLoader | Dataset) for part in silo):
        raise ValueError(
            f"silo {client} is a {type(silo).__name__} of {len(silo)} data sets or loaders: give a LightningDataModule "
            "with the client's training, validation and test loaders, or its training data alone"
        )
    if not (hasattr(silo, "__getitem__") and hasattr(silo, "__len__")) or isinstance(silo, str | dict):
        raise ValueError(
            f"silo {client} is a {type(silo).__name__}, expected a LightningDataModule, a DataLoader or a Dataset"
        )
    if len(silo) == 0:
        raise ValueError(f"silo {client} has no items: leave this client out, or give it data")
    return GivenLoaders(DataLoader(silo, batch_size, shuffle=True))
