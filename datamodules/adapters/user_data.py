"""Data sets of one's own: a pair of map-style Datasets, or a LightningDataModule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, Dataset

from pfl_lightning.datamodules.adapters.reading import read_dataset, read_datasets
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.base import Partitioner


class FromDatasets(FederatedDataModule):
    """A training and perhaps a test Dataset and one without labels, read once into tensors.

    An item is a pair (input, class): the input a picture, a tensor or an array, all of one shape (images as channels,
    height, width; pictures are brought into this order); the class a whole number from 0. Transforms inside the data
    set run once, when it is read.

    Samples without labels take part in the local fits of methods that need none, and in nothing else.

    Args:
        partition: The rule that says which client holds which samples.
        batch_size: Samples in a training batch.
        train: The training set, map-style.
        test: The test set, map-style; None to split test parts off the training set.
        unlabeled: Samples without labels, map-style: an item is an input, or a tuple that begins with one.
        class_names: A name for each class; None for the data set's own ``classes`` or numbers.
        kwargs: See :class:`FederatedDataModule`.
    """

    def __init__(
        self,
        partition: Partitioner,
        batch_size: int = 50,
        *,
        train: Dataset[Any],
        test: Dataset[Any] | None = None,
        unlabeled: Dataset[Any] | None = None,
        class_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(partition, batch_size, **kwargs)
        self.train = train
        self.test = test
        self.unlabeled = unlabeled
        self.given_names = class_names

    def __getstate__(self) -> dict[str, Any]:
        """Without the data sets once they are read."""
        read = {"train": None, "test": None, "unlabeled": None} if self._ready is not None else {}
        return {**super().__getstate__(), **read}

    def load(self) -> Samples:
        """Read every item once.

        Raises:
            TypeError: If a data set is not map-style, or an item is not what is expected.
            ValueError: If items differ in shape.
        """
        samples = read_datasets(self.train, self.test, self.given_names)
        if self.unlabeled is None:
            return samples
        inputs, _ = read_dataset(self.unlabeled, "unlabeled set", labeled=False)
        return replace(samples, unlabeled_inputs=inputs)


class FromLightning(FederatedDataModule):
    """A LightningDataModule of one's own: the Datasets behind its training and test loaders, read once into tensors.

    The test set is that of ``test_dataloader``, else of ``val_dataloader``, else it is split off the training set.
    Only the loaders' data sets are used: batch size, order and collating are those of this module.

    Args:
        partition: The rule that says which client holds which samples.
        batch_size: Samples in a training batch.
        datamodule: The module.
        class_names: A name for each class; None for the data set's own ``classes`` or numbers.
        kwargs: See :class:`FederatedDataModule`.
    """

    def __init__(
        self,
        partition: Partitioner,
        batch_size: int = 50,
        *,
        datamodule: LightningDataModule,
        class_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(partition, batch_size, **kwargs)
        self.datamodule = datamodule
        self.given_names = class_names

    def __getstate__(self) -> dict[str, Any]:
        """Without the module once it is read."""
        read = {"datamodule": None} if self._ready is not None else {}
        return {**super().__getstate__(), **read}

    def load(self) -> Samples:
        """Prepare the module and read its data sets once.

        Raises:
            TypeError: If a loader is not a single DataLoader over a map-style data set.
        """
        own = self.datamodule
        own.prepare_data()
        own.setup("fit")
        train = _dataset_of(own.train_dataloader(), "train_dataloader")
        test = None
        if is_overridden("test_dataloader", own, LightningDataModule):
            own.setup("test")
            test = _dataset_of(own.test_dataloader(), "test_dataloader")
        elif is_overridden("val_dataloader", own, LightningDataModule):
            test = _dataset_of(own.val_dataloader(), "val_dataloader")
        return read_datasets(train, test, self.given_names)


def _dataset_of(loader: Any, name: str) -> Dataset[Any]:
    while isinstance(loader, (list, tuple)) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise TypeError(f"{name} gives a {type(loader).__name__}, expected a single DataLoader")
    return loader.dataset
