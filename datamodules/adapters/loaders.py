"""Adapter of a LightningDataModule that keeps its Datasets, collate functions and batch sizes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule

from pfl_lightning.datamodules.adapters.items import ClientItems, ItemDataModule, ItemSource, ItemSplit
from pfl_lightning.datamodules.adapters.labels import classes_of, names_of_classes
from pfl_lightning.datamodules.adapters.stages import loaders_of, one_class, source_of
from pfl_lightning.datamodules.clients.division import IndexLists, check_batches
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError
from pfl_lightning.older_package import as_lightning

__all__ = ["FromLoaders"]

_log = logging.getLogger(__name__)


class FromLoaders(ItemDataModule):
    """LightningDataModule divided among clients, with items of any kind: pictures, tables, texts, dictionaries.

    The Dataset of the training loader is divided. Every client trains with the batch size, ``collate_fn``,
    ``drop_last`` and shuffling of that loader; items are read when they are needed, in this process.

    A client's validation split is drawn from the validation loader's Dataset, in the class proportions of its own
    training items where classes are known, and its test split from the test loader's Dataset. Without a validation
    loader, a share of each client's training items is held out. Without a test loader, there are no test splits. With
    neither, a share of all items is held out for tests first.

    Attributes that this module does not have are looked up in ``datamodule``.

    Args:
        partition: Rule that assigns the items to clients.
        datamodule: The data module to divide.
        labels: Function from an item to its class, needed if the rule uses classes and items are not pairs
            (input, class); see :func:`~pfl_lightning.datamodules.adapters.labels.classes_of`. Where neither the rule
            uses classes nor a function is given, no item is read for its class, and classes are known if the Dataset
            itself tells them (``targets``, or a TensorDataset).
        class_names: A name for each class; None for the data set's own ``classes`` or numbers.
        validation_share: Share of each client's training items that is held out; None for 0.1 without a validation
            loader, else 0.
        kwargs: See :class:`~pfl_lightning.datamodules.FederatedDataModule`: ``test_share``,
            ``test_samples_per_client``, ``novel_clients``, ``seed``.

    Raises:
        ValueError: If an option is given that the data module's own loaders determine.

    Example:
        >>> import torch
        >>> from lightning.pytorch import LightningDataModule
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from pfl_lightning.datamodules import IID, FromLoaders
        >>> class Project(LightningDataModule):
        ...     def setup(self, stage):
        ...         self.items = TensorDataset(torch.rand(60, 4), torch.arange(60) % 3)
        ...     def train_dataloader(self):
        ...         return DataLoader(self.items, batch_size=8, shuffle=True)
        ...     def test_dataloader(self):
        ...         return DataLoader(self.items, batch_size=32)
        >>> data = FromLoaders(IID(num_clients=3), datamodule=Project())
        >>> data.setup()
        >>> data.batch_size, data.num_classes, [len(data.client_data(client).train) for client in range(3)]
        (8, 3, [18, 18, 18])
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
            raise ValueError(
                f"{', '.join(sorted(own))}: the data module's own Datasets and loaders determine this; set it there"
            )
        super().__init__(partition, validation_share=0.1 if validation_share is None else validation_share, **kwargs)
        self.datamodule = as_lightning(datamodule)
        self.labels, self.given_names, self._share_is_given = labels, class_names, validation_share is not None
        self._labeled = True
        self._sources: dict[str, ItemSource] = {}
        self._validation: IndexLists | None = None

    def __getattr__(self, name: str) -> Any:
        """Attribute of the wrapped data module, such as its vocabulary."""
        own = self.__dict__.get("datamodule")
        if own is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(own, name)

    def __getstate__(self) -> dict[str, Any]:
        """State without Trainers."""
        own = copy.copy(self.datamodule)
        own.trainer = None
        return {**super().__getstate__(), "datamodule": own}

    def prepare_data(self) -> None:
        """Prepare the wrapped data module."""
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set up the wrapped data module and divide its data sets among the clients; a second call does nothing.

        Args:
            stage: Not used, since every stage has the same data.

        Raises:
            PartitionError: If the partition cannot be met, or its rule changes images or classes.
        """
        if self._ready is not None:
            return
        super().setup(stage)
        division, samples = self._loaded.division, self._loaded.samples
        if any(not view.is_identity for view in self._loaded.views):
            raise PartitionError(
                f"{type(self.partition).__name__} lets clients see images or classes differently, which items of a "
                "user-defined data set do not allow: use FromDatasets"
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
        """Set up the wrapped data module and read the classes; inputs are the positions of the items.

        Raises:
            TypeError: If a loader is not a single DataLoader over a map-style data set.
            PartitionError: If the rule needs classes and items have none.
        """
        own = self.datamodule
        loaders = loaders_of(own, self.trainer)
        train = loaders["train"]
        self.batch_size, self.drop_last = int(train.batch_size or 1), bool(train.drop_last)
        self._sources = {name: source_of(loader, own, name) for name, loader in loaders.items()}
        evaluated = loaders.get("validation", loaders.get("test", train))
        self.eval_batch_size = int(evaluated.batch_size or 1)
        if len(loaders) == 1:
            _log.warning(
                "%s has neither val_dataloader nor test_dataloader: %g of its training items are held out for tests",
                type(own).__name__,
                self.test_share,
            )
        elif "validation" in loaders and not self._share_is_given:
            self.validation_share = 0.0
        return self._samples()

    def _samples(self) -> Samples:
        # A file's rule goes on with the class proportions of the rule that it was written by.
        read = self.partition.needs_labels or self.partition.fixed_train
        found = {name: classes_of(source.dataset, self.labels, read=read) for name, source in self._sources.items()}
        known = {name: classes for name, classes in found.items() if classes is not None}
        self._labeled = len(known) == len(found)
        if not self._labeled and self.partition.needs_labels:
            name = next(name for name in found if name not in known)
            raise PartitionError(
                f"{type(self.partition).__name__} needs classes, and the items of the {name} set have none that is a "
                "whole number: pairs (input, class), a data set with targets, or labels=function of an item, such as "
                "the first of several labels. For a regression use IID, or Quantity on top of it"
            )
        names = self._names(known) if self._labeled else ("0",)
        self._classes = {
            name: known[name] if self._labeled else one_class(source) for name, source in self._sources.items()
        }
        tested = self._classes.get("test", self._classes.get("validation"))
        places = None if tested is None else torch.arange(len(tested))
        return Samples(
            torch.arange(len(self._classes["train"])),
            torch.from_numpy(self._classes["train"]),
            names,
            places,
            None if tested is None else torch.from_numpy(tested),
        )

    def _names(self, known: dict[str, Ints]) -> tuple[str, ...]:
        """Names of the classes; whole numbers that cannot be classes are none, where nobody has said that they are."""
        try:
            return names_of_classes(self.given_names, self._sources["train"].dataset, known.values())
        except ValueError:
            if self.partition.needs_labels or self.labels is not None or self.given_names is not None:
                raise
            self._labeled = False
            return ("0",)

    def client_data(self, client: int) -> ClientItems:  # type: ignore[override]  # splits of another kind
        """Splits of one client, made on demand without reading items.

        Args:
            client: Id from 0 to m - 1.

        Raises:
            IndexError: If there is no such client.
        """
        own, nothing = super().client_data(client), torch.empty(0, dtype=torch.int64)
        validation = self._split("train", own.validation.indices)
        test = self._split("test" if "test" in self._sources else "train", own.test.indices)
        if self._validation is not None:
            validation = self._split("validation", self._validation[client])
        elif "validation" in self._sources and "test" not in self._sources:
            test = self._split("train", nothing)
            if not len(validation):
                validation = self._split("validation", own.test.indices)
        return ClientItems(self._split("train", own.train.indices), validation, test)

    def _split(self, name: str, indices: torch.Tensor) -> ItemSplit:
        return ItemSplit(self._sources[name], indices, torch.from_numpy(self._classes[name]))
