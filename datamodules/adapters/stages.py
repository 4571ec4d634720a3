"""The loaders of a project by stage, from its data module or as they are given to a Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from pfl_lightning.datamodules.adapters.combined import StageLoaders
from pfl_lightning.datamodules.adapters.items import BatchSizes, ItemSource
from pfl_lightning.datamodules.adapters.orders import Order, SampledBatches, order_of
from pfl_lightning.datamodules.adapters.streams import Kept
from pfl_lightning.datamodules.adapters.workers import OneAtATime, Workers
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.memory import checked_length

__all__ = ["GivenLoaders", "brings", "loaders_of", "one_class", "source_of"]


class GivenLoaders(LightningDataModule):
    """Loaders that are given to a Trainer as they are, without a data module.

    Args:
        train: Loader of training batches.
        validation: Loader of validation batches; ``None`` for none.
        test: Loader of test batches; ``None`` for none.
        module: The LightningModule, whose own hooks give the loaders that are ``None``; ``None`` for no such module.

    Example:
        >>> own = GivenLoaders(DataLoader([1.0, 2.0, 3.0], batch_size=2))
        >>> [(name, loaders.first.batch_size) for name, loaders in loaders_of(own).items()]
        [('train', 2)]
    """

    def __init__(
        self, train: Any = None, validation: Any = None, test: Any = None, *, module: L.LightningModule | None = None
    ) -> None:
        super().__init__()
        self._given = {"train_dataloader": train, "val_dataloader": validation, "test_dataloader": test}
        self._module = [] if module is None else [module]  # no attribute of its own: it is the federation's

    def prepare_data(self) -> None:
        """Let the module prepare its data."""
        for module in self._module:
            module.prepare_data()

    def setup(self, stage: str) -> None:
        """Set up the module, whose loaders are asked for next."""
        for module in self._module:
            with _attached(module, self.trainer):
                module.setup(stage)

    def train_dataloader(self) -> Any:
        """The loader of training batches."""
        return self._loader("train_dataloader")

    def val_dataloader(self) -> Any:
        """The loader of validation batches, if there is one."""
        return self._loader("val_dataloader")

    def test_dataloader(self) -> Any:
        """The loader of test batches, if there is one."""
        return self._loader("test_dataloader")

    def predict_dataloader(self) -> Any:
        """The module's own loader for predictions, if there is one."""
        return self._loader("predict_dataloader")

    def _loader(self, name: str) -> Any:
        given = self._given.get(name)
        for module in self._module if given is None else ():
            if brings(module, name):
                with _attached(module, self.trainer):
                    return getattr(module, name)()
        return given


def brings(module: Any, name: str) -> bool:
    """Whether a LightningModule has a loader of its own: the name of the hook, such as ``"train_dataloader"``."""
    hook = getattr(module, name)
    return not str(getattr(hook, "__module__", "")).startswith(("lightning.pytorch.", "pytorch_lightning."))


@contextmanager
def _attached(module: L.LightningModule, trainer: Any) -> Iterator[None]:
    """Inside, the module has a Trainer."""
    before = module._trainer
    module.trainer = trainer
    try:
        yield
    finally:
        module._trainer = before


def loaders_of(
    datamodule: LightningDataModule, trainer: Any = None, *, streams: bool = False
) -> dict[str, StageLoaders]:
    """Set up a data module and ask for its loaders; those that it does not have are left out.

    Args:
        datamodule: The data module.
        trainer: What its ``setup`` sees as its Trainer.
        streams: Whether loaders are taken that can be used as they are alone: of an IterableDataset, say.

    Returns:
        The loaders of ``train``, ``validation`` and ``test``.

    Raises:
        TypeError: If a loader is no DataLoader over a map-style data set, or a stream where these are taken.
    """
    datamodule.trainer = trainer
    datamodule.setup("fit")
    loaders = {"train": _checked(datamodule.train_dataloader(), "train_dataloader", streams)}
    for stage, name in (("validation", "val_dataloader"), ("test", "test_dataloader")):
        if not is_overridden(name, datamodule, LightningDataModule):
            continue
        if stage == "test":
            datamodule.setup("test")
        loader = getattr(datamodule, name)()
        if loader is not None and not (isinstance(loader, list | tuple | dict) and not loader):
            found = _checked(loader, name, streams)
            if any(_has_items(own) for own in found.loaders):
                loaders[stage] = found
    datamodule.trainer = None
    return loaders


def source_of(
    loader: DataLoader[Any], datamodule: LightningDataModule, stage: str, turns: OneAtATime | None = None
) -> ItemSource:
    """Items of a loader with its collate function, its order and its workers.

    Args:
        loader: The loader.
        datamodule: The data module that it is of, whose hooks go with the batches.
        stage: ``"train"``, ``"validation"`` or ``"test"``.
        turns: For the loader of a single client, which is used as it is where its batches are not those of a plain
            loader: lets one client at a time have workers.
    """
    hooks = None if isinstance(datamodule, GivenLoaders) else datamodule
    if turns is not None and not _is_plain(loader):
        own = BatchSizes(int(loader.batch_size or 1), int(loader.batch_size or 1), False)
        kept = Kept(loader, turns)
        return ItemSource(loader.dataset, loader.collate_fn, True, hooks, batches=own, loader=kept)
    dataset, sampler, drop_last = loader.dataset, loader.sampler, loader.drop_last
    size: int | None = loader.batch_size
    order: Order | None = None
    batch_sampler: Any = loader.batch_sampler
    if size is None and type(batch_sampler) is BatchSampler:  # which a plain loader makes itself
        sampler, size, drop_last = batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last
    if type(sampler) is SubsetRandomSampler:
        dataset = Subset(dataset, [int(place) for place in sampler.indices])
    elif size is None:
        order = SampledBatches(batch_sampler, len(dataset))  # type: ignore[arg-type]
    elif not isinstance(dataset, IterableDataset) and not _goes_through(sampler):
        order = order_of(sampler, len(dataset))  # type: ignore[arg-type]
    shuffled = order is not None or not isinstance(sampler, SequentialSampler)
    workers = Workers(loader, dataset, turns) if loader.num_workers else None
    sizes = BatchSizes(int(size or 1), int(size or 1), bool(drop_last))
    return ItemSource(dataset, loader.collate_fn, shuffled, hooks, order, workers, sizes, stage != "train")


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether the package may read a loader's items itself: in batches of a number, in order or shuffled."""
    if isinstance(loader.dataset, IterableDataset):
        return loader.batch_size is not None and not loader.num_workers and hasattr(loader.dataset, "__len__")
    return loader.batch_size is not None and (
        _goes_through(loader.sampler) or type(loader.sampler) is SubsetRandomSampler
    )


def _goes_through(sampler: Any) -> bool:
    """Whether a sampler gives every item once, in order or shuffled."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler._num_samples is None
    return type(sampler) is SequentialSampler


def one_class(source: ItemSource) -> Ints:
    """The class 0 for every item, where items have none; of a stream of unknown length for one item."""
    if isinstance(source.dataset, IterableDataset) and not hasattr(source.dataset, "__len__"):
        return np.zeros(1, dtype=np.int64)
    return np.zeros(checked_length(source.dataset, "data set"), dtype=np.int64)


def _has_items(loader: Any) -> bool:
    """Whether there is something to evaluate."""
    dataset = loader.dataset
    return not (hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset) and len(dataset) == 0)


def _checked(given: Any, name: str, streams: bool) -> StageLoaders:
    found = StageLoaders.of(given, name == "train_dataloader")
    for loader in found.loaders:
        _check(loader, name, streams)
    return found


def _check(loader: Any, name: str, streams: bool) -> None:
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"{name} gives a {type(loader).__name__}, expected a DataLoader, or a list, a dictionary or a "
            "CombinedLoader of them"
        )
    is_stream, sized = isinstance(loader.dataset, IterableDataset), hasattr(loader.dataset, "__len__")
    if (is_stream and not streams) or not (is_stream or sized):
        raise TypeError(
            f"{name} is over a {type(loader.dataset).__name__}, which cannot be indexed: clients hold index lists, so "
            "give a map-style Dataset with __len__ and __getitem__, or a list of data sets, one a client"
        )
    if not streams:
        _check_sampler(loader, name)


def _check_sampler(loader: DataLoader[Any], name: str) -> None:
    """Whether a sampler gives numbers of items, of which each is of one client."""
    advice = (
        "give the DataLoader a batch_size and a sampler of numbers, or a list of loaders, one a client, each used as "
        "it is"
    )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise TypeError(f"{name} has no batch size: its Dataset gives whole batches, which cannot be divided; {advice}")
    sampler = loader.batch_sampler if loader.batch_size is None else loader.sampler
    if _goes_through(sampler) or type(sampler) is BatchSampler:
        return
    with isolate_rng(include_cuda=False):
        first = next(iter(sampler), None)  # type: ignore[arg-type]
    if loader.batch_size is None and isinstance(first, Iterable):
        first = next(iter(first), None)
    if first is not None and not (hasattr(first, "__index__") or (isinstance(first, Tensor) and first.numel() == 1)):
        raise TypeError(
            f"{name} has a {type(sampler).__name__}, which gives {type(first).__name__}s in the place of numbers of "
            f"items: {advice}"
        )
    if loader.batch_size is None:
        warnings.warn(
            f"{name}: of each batch of the {type(sampler).__name__} a client gets its own items, so that its batches "
            "are smaller; a list of loaders, one a client, uses each as it is",
            stacklevel=2,
        )
