"""The data of a Lightning project, divided among clients: its Datasets, collating and batch sizes stay as they are."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from pfl_lightning.datamodules.adapters.items import ClientItems, ItemSource, ItemSplit
from pfl_lightning.datamodules.adapters.labels import classes_of
from pfl_lightning.datamodules.clients.division import IndexLists, check_batches
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError

__all__ = ["FromLoaders"]

_log = logging.getLogger(__name__)


class FromLoaders(FederatedDataModule):
    """A LightningDataModule of one's own, of which each client gets items: pictures, tables, texts, dictionaries.

    The training loader says which Dataset is divided, and its batch size, ``collate_fn``, ``drop_last`` and whether it
    shuffles hold in every local fit; items are read when they are needed, in this process. A client's validation
    part is drawn from the validation loader's Dataset in the class proportions of its own training items, and its test
    part from the test loader's. Without a validation loader a share of each client's training items is set aside;
    without a test loader there are no test parts; with neither, a share of all items is set aside for tests first.

    What this module does not have is looked up in ``datamodule``.

    Args:
        partition: The rule that says which client holds which items.
        datamodule: The module.
        labels: Gives the class of an item, where the rule needs one and items are not pairs (input, class); see
            :func:`~pfl_lightning.datamodules.adapters.labels.classes_of`.
        class_names: A name for each class; None for the data set's own ``classes`` or numbers.
        validation_share: Share of each client's training items that is set aside; None for 0.1 where there is no
            validation loader, else 0.
        kwargs: See :class:`FederatedDataModule`: ``test_share``, ``test_samples_per_client``, ``novel_clients``,
            ``seed``.
    """

    def __init__(
        self,
        partition: Partitioner,
        *,
        datamodule: LightningDataModule,
        labels: Callable[[Any], Any] | None = None,
        class_names: Sequence[str] | None = None,
        validation_share: float | None = None,
        **kwargs: Any,
    ) -> None:
        own = {"augment", "normalize", "mean", "std", "batch_size", "drop_last", "eval_batch_size"} & kwargs.keys()
        if own:
            raise ValueError(f"{', '.join(sorted(own))}: the data module's own Datasets and loaders say that")
        super().__init__(partition, validation_share=0.1 if validation_share is None else validation_share, **kwargs)
        self.datamodule = datamodule
        self.labels, self.given_names, self._share_is_given = labels, class_names, validation_share is not None
        self._labeled = True
        self._sources: dict[str, ItemSource] = {}
        self._validation: IndexLists | None = None

    def __getattr__(self, name: str) -> Any:
        """What the project's own module has, such as its vocabulary."""
        own = self.__dict__.get("datamodule")
        if own is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(own, name)

    def __getstate__(self) -> dict[str, Any]:
        """Without Trainers."""
        own = copy.copy(self.datamodule)
        own.trainer = None
        return {**super().__getstate__(), "datamodule": own}

    def prepare_data(self) -> None:
        """Prepare the project's module."""
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set the project's module up and divide its data sets among the clients; a second call does nothing."""
        if self._ready is not None:
            return
        super().setup(stage)
        division, samples = self._loaded.division, self._loaded.samples
        if any(not view.is_identity for view in self._loaded.views):
            raise PartitionError(
                f"{type(self.partition).__name__} lets clients see images or classes differently, which items of one's "
                "own data set do not allow; use FromDatasets"
            )
        if self.drop_last:
            check_batches(division, self.batch_size)
        if "validation" in self._sources and "test" in self._sources and not division.validation.sizes.any():
            targets = samples.train_targets.numpy()
            held = [targets[part] for part in division.train.arrays()]
            classes = self._classes["validation"]
            self._validation = IndexLists(
                Partitioner.partition_test(self.partition, classes, held, self.test_samples_per_client)
            )

    def load(self) -> Samples:
        """Set the module up and see which item is of which class; items are stood for by their places.

        Raises:
            TypeError: A loader is not a single DataLoader over a map-style data set.
            PartitionError: The rule needs classes and items have none.
        """
        own = self.datamodule
        own.trainer = self.trainer
        own.setup("fit")
        train = _loader_of(own.train_dataloader(), "train_dataloader")
        self.batch_size, self.drop_last = int(train.batch_size or 1), bool(train.drop_last)
        loaders = {"train": train}
        if is_overridden("val_dataloader", own, LightningDataModule):
            loaders["validation"] = _loader_of(own.val_dataloader(), "val_dataloader")
        if is_overridden("test_dataloader", own, LightningDataModule):
            own.setup("test")
            loaders["test"] = _loader_of(own.test_dataloader(), "test_dataloader")
        own.trainer = None
        self._sources = {name: _source_of(loader, own, name) for name, loader in loaders.items()}
        evaluated = loaders.get("validation", loaders.get("test", train))
        self.eval_batch_size = int(evaluated.batch_size or 1)
        if len(loaders) == 1:
            _log.warning(
                "%s has neither val_dataloader nor test_dataloader: %g of its training items are set aside for tests",
                type(own).__name__,
                self.test_share,
            )
        elif "validation" in loaders and not self._share_is_given:
            self.validation_share = 0.0
        return self._samples()

    def _samples(self) -> Samples:
        found = {name: classes_of(source.dataset, self.labels) for name, source in self._sources.items()}
        self._labeled = all(classes is not None for classes in found.values())
        if not self._labeled and self.partition.needs_labels:
            name = next(name for name, classes in found.items() if classes is None)
            raise PartitionError(
                f"{type(self.partition).__name__} goes by classes, and the items of the {name} set have none that is a "
                "whole number: pairs (input, class), a data set with targets, or labels=function of an item. For a "
                "regression use IID, or Quantity on top of it"
            )
        self._classes = {
            name: classes if self._labeled and classes is not None else _one_class(self._sources[name])
            for name, classes in found.items()
        }
        tested = self._classes.get("test", self._classes.get("validation"))
        places = None if tested is None else torch.arange(len(tested))
        return Samples(
            torch.arange(len(self._classes["train"])),
            torch.from_numpy(self._classes["train"]),
            self._names(),
            places,
            None if tested is None else torch.from_numpy(tested),
        )

    def _names(self) -> tuple[str, ...]:
        highest = max(int(classes.max()) for classes in self._classes.values())
        names: Any = self.given_names
        if names is None:
            names = getattr(self._sources["train"].dataset, "classes", None)
            if names is None or not hasattr(names, "__len__") or len(names) <= highest:
                names = range(highest + 1)
        return tuple(str(name) for name in names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Not to be had: items may have any shape.

        Raises:
            ValueError: Always; it says what has one.
        """
        raise ValueError(
            "FromLoaders hands out items of any kind, of no known shape: an encoder needs FromLightning or FromDatasets"
        )

    @property
    def num_classes(self) -> int:
        """Number of classes C; 0 where items have none."""
        return len(self.class_names) if self._labeled else 0

    def client_data(self, client: int) -> ClientItems:  # type: ignore[override]  # parts of another kind
        """All that one client sees: views, made on demand."""
        own, nothing = super().client_data(client), torch.empty(0, dtype=torch.int64)
        validation = self._part("train", own.validation.indices)
        test = self._part("test" if "test" in self._sources else "train", own.test.indices)
        if self._validation is not None:
            validation = self._part("validation", self._validation[client])
        elif "validation" in self._sources and "test" not in self._sources:
            test = self._part("train", nothing)
            if not len(validation):
                validation = self._part("validation", own.test.indices)
        return ClientItems(self._part("train", own.train.indices), validation, test)

    def _part(self, name: str, indices: torch.Tensor) -> ItemSplit:
        return ItemSplit(self._sources[name], indices, torch.from_numpy(self._classes[name]))


def _one_class(source: ItemSource) -> Ints:
    return np.zeros(len(source.dataset), dtype=np.int64)


def _loader_of(loader: Any, name: str) -> DataLoader[Any]:
    while isinstance(loader, list | tuple) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        many = isinstance(loader, list | tuple | dict) or hasattr(loader, "iterables")
        got = "several loaders" if many else f"a {type(loader).__name__}"
        raise TypeError(f"{name} gives {got}, expected a single DataLoader: a client has one data set")
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise TypeError(
            f"{name} is over a {type(loader.dataset).__name__}, which cannot be indexed: clients hold index lists, so "
            "give a map-style Dataset with __len__ and __getitem__"
        )
    if loader.batch_size is None:
        raise TypeError(f"{name} has a batch sampler of its own or no batch size: give the DataLoader a batch_size")
    return loader


def _source_of(loader: DataLoader[Any], datamodule: LightningDataModule, name: str) -> ItemSource:
    if name == "train" and not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        warnings.warn(
            f"the training loader's {type(loader.sampler).__name__} is not used: a client's items come in a fresh "
            "random order, each once an epoch",
            stacklevel=2,
        )
    shuffled = not isinstance(loader.sampler, SequentialSampler)
    return ItemSource(loader.dataset, loader.collate_fn, shuffled, datamodule)
