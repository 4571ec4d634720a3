"""Adapters of user-defined data that are read once into tensors: Datasets, or a LightningDataModule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, Dataset, Subset

from pfl_lightning.datamodules.adapters.reading import read_dataset, read_datasets
from pfl_lightning.datamodules.adapters.sources import selection_of
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.base import Partitioner
from pfl_lightning.older_package import as_lightning


class FromDatasets(FederatedDataModule):
    """Training Dataset, and optionally a test and an unlabeled Dataset, read once into tensors.

    An item is a pair (input, class), or a dictionary with both, as those of Hugging Face's ``datasets``. The input is a
    picture, a tensor or an array, all of one shape (images as channels, height, width; pictures are converted to this
    order). The class is a whole number from 0. Transforms inside the data set run once, when it is read.

    Only self-supervised methods use unlabeled samples, and only for training.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        train: The training set, map-style.
        test: The test set, map-style; None to hold out test samples from the training set.
        unlabeled: Unlabeled samples, map-style: an item is an input, or a tuple that begins with one.
        class_names: A name for each class; None for the data set's own ``classes`` or numbers.
        keys: Keys of the input and of the class in items that are dictionaries, such as ``("img", "fine_label")``; None
            for the usual names (``image``, ``img``, ``pixel_values``, ...; ``label``, ``labels``, ``target``, ...).
        kwargs: See :class:`FederatedDataModule`.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from pfl_lightning.datamodules import IID, FromDatasets
        >>> train = TensorDataset(torch.rand(60, 3, 8, 8), torch.arange(60) % 10)
        >>> test = TensorDataset(torch.rand(20, 3, 8, 8), torch.arange(20) % 10)
        >>> data = FromDatasets(IID(num_clients=3), train=train, test=test, validation_share=0.0)
        >>> data.setup()
        >>> data.num_classes, data.input_shape, [len(data.client_data(client).train) for client in range(3)]
        (10, (3, 8, 8), [20, 20, 20])
    """

    def __init__(
        self,
        partition: Partitioner,
        batch_size: int = 50,
        *,
        # Without a type of items: of a data set in a config the parser would otherwise take no options.
        train: Dataset,  # type: ignore[type-arg]
        test: Dataset | None = None,  # type: ignore[type-arg]
        unlabeled: Dataset | None = None,  # type: ignore[type-arg]
        class_names: Sequence[str] | None = None,
        keys: tuple[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(partition, batch_size, **kwargs)
        self.keys = keys
        self.train = train
        self.test = test
        self.unlabeled = unlabeled
        self.given_names = class_names

    def __getstate__(self) -> dict[str, Any]:
        """State without the data sets once they are read."""
        read = {"train": None, "test": None, "unlabeled": None} if self._ready is not None else {}
        return {**super().__getstate__(), **read}

    def load(self) -> Samples:
        """Read every item once.

        Raises:
            TypeError: If a data set is not map-style, or an item has an unexpected type.
            ValueError: If items differ in shape.
        """
        samples = read_datasets(self.train, self.test, self.given_names, self.keys)
        if self.unlabeled is None:
            return samples
        inputs, _ = read_dataset(self.unlabeled, "unlabeled set", labeled=False, keys=self.keys)
        return replace(samples, unlabeled_inputs=inputs)


class FromLightning(FederatedDataModule):
    """LightningDataModule whose training and test Datasets are read once into tensors.

    The test set is that of ``test_dataloader``, else of ``val_dataloader``; without both, test samples are held out
    from the training set. Only the loaders' data sets are used (of a SubsetRandomSampler or a list of places, its part
    of one): batch size, order and collating are those of this module. :class:`FromLoaders` keeps the loaders' settings
    instead.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        datamodule: The data module to divide.
        class_names: A name for each class; None for the data set's own ``classes`` or numbers.
        kwargs: See :class:`FederatedDataModule`.

    Example:
        >>> import torch
        >>> from lightning.pytorch import LightningDataModule
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from pfl_lightning.datamodules import IID, FromLightning
        >>> class Project(LightningDataModule):
        ...     def train_dataloader(self):
        ...         return DataLoader(TensorDataset(torch.rand(60, 4), torch.arange(60) % 3))
        ...     def val_dataloader(self):
        ...         return DataLoader(TensorDataset(torch.rand(30, 4), torch.arange(30) % 3))
        >>> data = FromLightning(IID(num_clients=3), batch_size=10, datamodule=Project(), validation_share=0.0)
        >>> data.setup()
        >>> len(data.client_data(0).train), len(data.client_data(0).test)
        (20, 20)
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
        self.datamodule = as_lightning(datamodule)
        self.given_names = class_names

    def __getstate__(self) -> dict[str, Any]:
        """State without the wrapped data module once it is read."""
        read = {"datamodule": None} if self._ready is not None else {}
        return {**super().__getstate__(), **read}

    def load(self) -> Samples:
        """Prepare the wrapped data module and read its data sets once.

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
    places = selection_of(loader)
    return loader.dataset if places is None else Subset(loader.dataset, places)
