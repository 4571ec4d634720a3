"""The loaders of a project by stage, from its data module or as they are given to a Trainer."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from pfl_lightning.datamodules.adapters.items import ItemSource
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.memory import checked_length

__all__ = ["GivenLoaders", "loaders_of", "one_class", "source_of"]


class GivenLoaders(LightningDataModule):
    """Loaders that are given to a Trainer as they are, without a data module.

    Args:
        train: Loader of training batches.
        validation: Loader of validation batches; ``None`` for none.
        test: Loader of test batches; ``None`` for none.

    Example:
        >>> own = GivenLoaders(DataLoader([1.0, 2.0, 3.0], batch_size=2))
        >>> [(name, loader.batch_size) for name, loader in loaders_of(own).items()]
        [('train', 2)]
    """

    def __init__(self, train: Any, validation: Any = None, test: Any = None) -> None:
        super().__init__()
        self._given = {"train": train, "validation": validation, "test": test}

    def train_dataloader(self) -> Any:
        """The loader of training batches."""
        return self._given["train"]

    def val_dataloader(self) -> Any:
        """The loader of validation batches, if there is one."""
        return self._given["validation"]

    def test_dataloader(self) -> Any:
        """The loader of test batches, if there is one."""
        return self._given["test"]


def loaders_of(
    datamodule: LightningDataModule, trainer: Any = None, *, streams: bool = False
) -> dict[str, DataLoader[Any]]:
    """Set up a data module and ask for its loaders; those that it does not have are left out.

    Args:
        datamodule: The data module.
        trainer: What its ``setup`` sees as its Trainer.
        streams: Whether an IterableDataset with a length is taken.

    Returns:
        The loaders of ``train``, ``validation`` and ``test``.

    Raises:
        TypeError: If a loader is not a single DataLoader over a map-style data set, or a stream where these are taken.
    """
    datamodule.trainer = trainer
    datamodule.setup("fit")
    loaders = {"train": _single(datamodule.train_dataloader(), "train_dataloader", streams)}
    for stage, name in (("validation", "val_dataloader"), ("test", "test_dataloader")):
        if not is_overridden(name, datamodule, LightningDataModule):
            continue
        if stage == "test":
            datamodule.setup("test")
        loader = getattr(datamodule, name)()
        if loader is not None and not (isinstance(loader, list | tuple) and not loader):
            loaders[stage] = _single(loader, name, streams)
    datamodule.trainer = None
    return loaders


def source_of(loader: DataLoader[Any], datamodule: LightningDataModule, name: str) -> ItemSource:
    """Items of a loader with its collate function and order.

    Args:
        loader: The loader.
        datamodule: The data module that it is of, whose hooks go with the batches.
        name: Its stage.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    if name == "train" and not is_stream and not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        warnings.warn(
            f"the training loader's {type(loader.sampler).__name__} is not used: a client's items come in a new random "
            "order every epoch, each once",
            stacklevel=2,
        )
    shuffled = not isinstance(loader.sampler, SequentialSampler)
    hooks = None if isinstance(datamodule, GivenLoaders) else datamodule
    return ItemSource(loader.dataset, loader.collate_fn, shuffled, hooks)


def one_class(source: ItemSource) -> Ints:
    """The class 0 for every item, where items have none."""
    return np.zeros(checked_length(source.dataset, "data set"), dtype=np.int64)


def _single(loader: Any, name: str, streams: bool) -> DataLoader[Any]:
    while isinstance(loader, list | tuple) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        many = isinstance(loader, list | tuple | dict) or hasattr(loader, "iterables")
        got = "several loaders" if many else f"a {type(loader).__name__}"
        raise TypeError(f"{name} gives {got}, expected a single DataLoader, since a client has one data set")
    is_stream, sized = isinstance(loader.dataset, IterableDataset), hasattr(loader.dataset, "__len__")
    if is_stream and streams and not sized:
        raise TypeError(
            f"{name} is over a {type(loader.dataset).__name__} of unknown length, by which clients are weighted: give "
            "the IterableDataset a __len__, its number of items in an epoch"
        )
    if (is_stream and not streams) or not sized:
        raise TypeError(
            f"{name} is over a {type(loader.dataset).__name__}, which cannot be indexed: clients hold index lists, so "
            "give a map-style Dataset with __len__ and __getitem__, or a list of data sets, one a client"
        )
    if loader.batch_size is None:
        raise TypeError(f"{name} has a user-defined batch sampler or no batch size: give the DataLoader a batch_size")
    return loader
