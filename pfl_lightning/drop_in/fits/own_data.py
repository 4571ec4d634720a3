"""One client's items in the places where a module, or its data module, holds those of all clients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from pfl_lightning.data import BatchSource, SplitSource
from pfl_lightning.datamodules.adapters.items import own_items
from pfl_lightning.datamodules.adapters.sources import OwnItems
from pfl_lightning.datamodules.adapters.stages import brings
from pfl_lightning.datamodules.adapters.workers import nested_datasets, plain_values, set_values
from pfl_lightning.drop_in.fits.module_calls import nothing
from pfl_lightning.drop_in.fits.over_rounds import FitProgress
from pfl_lightning.fit.data import FitData

HOOKS = {"train": "train_dataloader", "validation": "val_dataloader", "test": "test_dataloader"}


class OwnData:
    """What a module finds in its own attributes and loader hooks while it runs for one client.

    An attribute that is a divided Dataset, or a loader of one, also in a list or a dictionary, is that of the client's
    items, so that its length and content are what the client trains on or is evaluated on.

    Args:
        data: The client's data.
        stage: ``"validation"`` or ``"test"``, where a part is evaluated.
        part: That part.
    """

    def __init__(self, data: FitData, stage: str | None = None, part: SplitSource | None = None) -> None:
        self._data = data
        found: dict[str, Any] = {"train": data.part, "validation": data.validation}
        if stage is not None:
            found[stage] = part
        self._parts = {name: one for name, one in found.items() if one is not None and len(one)}

    def attributes(self, owner: Any) -> dict[str, Any]:
        """The client's own values of attributes of a module or data module, by name."""
        own = ((name, value, self._own(value)) for name, value in vars(owner).items())
        return {name: new for name, value, new in own if new is not value}

    def hooks(self, owner: Any) -> dict[str, Callable[[], Any]]:
        """The client's own loaders in the place of the hooks that a module has."""
        found = dict[str, Callable[[], Any]]()
        for stage, part in self._parts.items():
            if brings(owner, HOOKS[stage]) and any(True for _ in divided(part)):
                size = self._data.batch_size if stage == "train" else self._data.eval_batch_size
                loader = partial(self._loader, stage, part, size, stage == "train", self._data.drop_last)
                found[HOOKS[stage]] = loader
        return found

    def _own(self, value: Any) -> Any:
        if isinstance(value, DataLoader):
            return self._own_loader(value)
        if isinstance(value, Dataset):
            found = self._part_of(value)
            return value if found is None else own_items(found[1])
        if isinstance(value, CombinedLoader):
            return self._combined(value)
        if type(value) in (list, tuple):
            parts = [self._own(one) for one in value]
            return value if all(map(is_, parts, value)) else type(value)(parts)
        if type(value) is dict:
            entries = {key: self._own(one) for key, one in value.items()}
            return value if all(map(is_, entries.values(), value.values())) else entries
        return value

    def _own_loader(self, value: DataLoader[Any]) -> Any:
        found = self._part_of(value.dataset)
        if found is None:
            return value
        stage, part = found
        trains = stage == "train" and not isinstance(value.sampler, SequentialSampler)
        size = value.batch_size or (self._data.batch_size if stage == "train" else self._data.eval_batch_size)
        drop_last = self._data.drop_last if trains and size == self._data.batch_size else value.drop_last
        return self._loader(stage, part, size, trains, drop_last)

    def _combined(self, value: CombinedLoader) -> Any:
        for stage, part in self._parts.items():
            found = [self._part_of(getattr(one, "dataset", None)) for one in value.flattened]
            if hasattr(part, "parts") and [one and one[1] for one in found] == list(part.parts):
                return self._loader(stage, part, self._data.batch_size, stage == "train", self._data.drop_last)
        return value

    @staticmethod
    def _loader(stage: str, part: Any, size: int, shuffle: bool, drop_last: bool) -> Any:
        draws = torch.Generator().manual_seed(torch.initial_seed()) if shuffle else None
        drop_last = drop_last and stage == "train" and size <= len(part)
        return part.loader(size, device="cpu", generator=draws, shuffle=shuffle, drop_last=drop_last)

    def _part_of(self, dataset: Any) -> tuple[str, Any] | None:
        """The client's part of a Dataset, with its stage; ``None`` where it is not divided, or all of it is its own."""
        for stage, part in self._parts.items():
            for one in divided(part):
                whole = one.source.dataset
                if dataset is whole or (isinstance(whole, OwnItems) and dataset is whole.dataset):
                    return stage, one
        return None


@contextmanager
def own_values(part: Any, progress: FitProgress | None) -> Iterator[None]:
    """Inside, divided Datasets have the plain attributes that the client's last fits have left; afterwards the first.

    So a curriculum that a fit advances is the client's own, and not advanced by those that share the Dataset.

    Args:
        part: The client's training items.
        progress: Of the fit, which hands on what the attributes come to; ``None`` where nothing goes on.
    """
    datasets = [each for one in divided(part) for each in nested_datasets(one.source.dataset)]
    first = plain_values(datasets)
    if progress is not None and progress.settings.continues and progress.earlier.datasets:
        set_values(datasets, progress.earlier.datasets)
    try:
        yield
        found = plain_values(datasets)
        if progress is not None and found != first:
            progress.keep_datasets(found)
    finally:
        set_values(datasets, first)


def divided(part: Any) -> Iterator[Any]:
    """The parts of Datasets of which a client has some items alone."""
    for one in getattr(part, "parts", (part,)):
        whole: Any = getattr(getattr(one, "source", None), "dataset", None)
        if hasattr(one, "indices") and hasattr(whole, "__len__") and len(one) != len(whole):
            yield one


def standing_in(
    datamodule: LightningDataModule, loaders: Mapping[str, BatchSource | None], own: OwnData
) -> LightningDataModule:
    """The data module of one client: with its batches as loaders, and its items in attributes; it is set up already.

    Args:
        datamodule: The data module.
        loaders: Those that its Trainer asks for, by the names of the hooks.
        own: What the client has of the data.
    """
    found = copy.copy(datamodule)
    functions: dict[str, Any] = dict.fromkeys(("prepare_data", "setup", "teardown"), nothing)
    functions |= own.attributes(datamodule) | own.hooks(datamodule)
    for name, loader in loaders.items():
        functions[name] = partial(_given, [] if loader is None else loader)
    vars(found).update(functions)
    return found


def _given(loader: Any) -> Any:
    return loader
