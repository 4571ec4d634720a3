"""Adapter of a LightningDataModule that keeps its Datasets, collate functions and batch sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningDataModule

from pfl_lightning.datamodules.adapters.items import ClientItems, ItemDataModule, ItemSplit
from pfl_lightning.datamodules.adapters.sources import ItemSource, evaluation_size, find_classes, source_of
from pfl_lightning.datamodules.adapters.stages import StageLoaders, loaders_of, warn_of_other_items
from pfl_lightning.datamodules.adapters.streams import joined
from pfl_lightning.datamodules.clients.division import check_batches
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.counting import Ints, Parts
from pfl_lightning.datamodules.module import warn_unless_federated
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError, check_parts
from pfl_lightning.older_package import as_lightning
from pfl_lightning.options import DivisionOptions, Unpack

_log = logging.getLogger(__name__)


class FromLoaders(ItemDataModule):
    """LightningDataModule divided among clients, with items of any kind: pictures, tables, texts, dictionaries.

    The Dataset of the training loader is divided. Every client trains with the batch size, ``collate_fn``,
    ``drop_last``, shuffling and workers of that loader; items are read when they are needed. Of several loaders every
    Dataset is divided, and a client's batches are combined as theirs.

    A client's validation split is drawn from the validation loader's Dataset, in the class proportions of its own
    training items where classes are known, and its test split from the test loader's Dataset. Without a validation
    loader, a share of each client's training items is held out. Without a test loader, there are no test splits. With
    neither, a share of all items is held out for tests first.

    Attributes that this module does not have are looked up in ``datamodule``.

    Attributes:
        holds_out: Whether items are held out where there are neither validation nor test loaders; if not, clients train
            on all of theirs, and nothing is evaluated.
        shared_evaluation: Whether every client is evaluated on all items of the validation and test loaders.

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
        **kwargs: Unpack[DivisionOptions],
    ) -> None:
        own = {"augment", "normalize", "mean", "std", "batch_size", "drop_last", "eval_batch_size", "public"}
        if given := own & kwargs.keys():
            raise ValueError(
                f"cannot set {', '.join(sorted(given))} here, where the data module's own Datasets and loaders decide: "
                "set it there, or use FromLightning or FromDatasets, which read all items"
            )
        share = 0.1 if validation_share is None else validation_share
        super().__init__(partition, [as_lightning(datamodule)], validation_share=share, **kwargs)
        self.labels, self.given_names, self._share_is_given = labels, class_names, validation_share is not None
        self._labeled, self.holds_out, self.shared_evaluation = True, True, False
        self._stages: dict[str, StageLoaders] = {}
        self._sources: dict[str, tuple[ItemSource, ...]] = {}
        self._items: list[int] = []
        self.held_source: ItemSource | None = None  # what the training items that are held out are read by
        self._others: dict[str, list[Sequence[Ints]]] = {}
        self._validation: Sequence[Ints] | None = None

    @property
    def datamodule(self) -> LightningDataModule:
        """The data module that is divided."""
        return self._owners[0]

    def __getstate__(self) -> dict[str, Any]:
        """State without loaders."""
        shapes = {name: replace(found, loaders=()) for name, found in self._stages.items()}
        return {**super().__getstate__(), "_stages": shapes}

    def state_dict(self) -> dict[str, Any]:
        """What the wrapped data module keeps in checkpoints."""
        return dict(self.datamodule.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the wrapped data module."""
        self.datamodule.load_state_dict(state_dict)

    def setup(self, stage: str | None = None) -> None:
        """Set up the wrapped data module and divide its data sets among the clients, once.

        Args:
            stage: In a later call for ``"fit"`` a warning says so if the data module has another number of items.

        Raises:
            PartitionError: If the partition cannot be met, or its rule changes images or classes.
        """
        if self._ready is not None:
            if stage != "predict":  # whose batches are the user's own
                warn_unless_federated(getattr(self.trainer, "lightning_module", None))
            if stage == "fit":
                divided = [source.dataset for source in self._sources["train"]]
                warn_of_other_items(self.datamodule, divided, self._items, self.trainer)
            return
        super().setup(stage)
        if any(not view.is_identity for view in self._loaded.views):
            raise PartitionError(
                f"{type(self.partition).__name__} changes images or classes for each client, which a user-defined "
                "data set does not allow: use FromDatasets"
            )
        tested = self._classes.get("test", self._classes.get("validation"))
        if tested is None and self.shared_evaluation:
            raise PartitionError(
                "shared_evaluation gives every client all items of the validation and test loaders, but there are "
                "none: leave it out, or add such a loader"
            )
        if tested is not None and self.evaluates_on_all:
            self._ready = replace(self._loaded, test=self._evaluated(tested[0]))
        division = self._loaded
        if self.drop_last and self._sources["train"][0].order is None:
            check_batches(division, self.batch_size)
        if "validation" in self._sources and "test" in self._sources and not len(division.validation.values):
            self._validation = self._evaluated(self._classes["validation"][0])
        self._others = {stage: self._divide_others(stage) for stage in self._sources}

    @property
    def pooled_numbers(self) -> dict[int, str]:
        """Numbers of training batches and items in a plain run; none where one client has all."""
        found: dict[int, str] = {}
        for loader in self._stages["train"].loaders if self.num_clients > 1 else ():
            found.setdefault(len(loader.dataset), "training items")
            if (batches := sized_len(loader)) is not None:
                found[batches] = "training batches"
        return found

    @property
    def evaluates_on_all(self) -> bool:
        """Whether clients are evaluated on all items: by the option, or because one client holds all."""
        held, rule = self._loaded, self.partition
        if self.shared_evaluation:
            return True
        if self.num_clients > 1 or rule.fixed_test or self.test_samples_per_client is not None:
            return False
        return len(held.train[0]) + len(held.validation[0]) == len(self._classes["train"][0])

    def _evaluated(self, classes: Ints) -> Sequence[Ints]:
        """Items of an evaluation for each client, in the class proportions of its training items."""
        if self.evaluates_on_all:
            return [np.arange(len(classes), dtype=np.int64)] * self.num_clients
        train = self._loaded.train
        held = Parts(self._loaded.samples.train_targets.numpy()[train.values], train.sizes)
        return Partitioner.partition_test(self.partition, classes, held, self.test_samples_per_client)

    def _divide_others(self, stage: str) -> list[Sequence[Ints]]:
        """Items of the second loader of a stage, the third, and so on."""
        others = self._classes[stage][1:]
        if stage != "train":
            return [self._evaluated(classes) for classes in others]
        found: list[Sequence[Ints]] = []
        for number, classes in enumerate(others, 1):
            if self.partition.fixed_train:
                raise PartitionError(
                    f"{type(self.partition).__name__} lists the items of one Dataset, but train_dataloader gives "
                    "several: use a rule, or a list with the data of each client"
                )
            lists = check_parts(self.partition, self.partition.partition(classes), len(classes))
            own = self._sources["train"][number].batches
            least = own.batch_size if own.drop_last else 1
            if (lists.sizes < least).any():
                client = int((lists.sizes < least).argmax())
                raise PartitionError(
                    f"client {client} gets {len(lists[client])} items of training loader {number}, a batch "
                    f"needs {least}: lower num_clients or the loader's batch_size, or set drop_last to false"
                )
            found.append(lists)
        return found

    def load(self) -> Samples:
        """Set up the wrapped data module and read the classes; inputs are the positions of the items.

        Raises:
            TypeError: If a loader is no DataLoader over a map-style data set.
            PartitionError: If the rule needs classes and items have none.
        """
        own = self.datamodule
        self._stages = loaders = loaders_of(own, self.trainer)
        self._sources = {
            name: tuple(source_of(loader, own, name) for loader in found.loaders) for name, found in loaders.items()
        }
        self._items = [len(source.dataset) for source in self._sources["train"]]
        # With workers of its own: read while clients train, too.
        held = source_of(loaders["train"].loaders[0], own, "train")
        self.held_source = replace(held, order=None)
        self.batch_size, self.drop_last = held.batches.batch_size, held.batches.drop_last
        self.eval_batch_size = evaluation_size(self._sources)
        if len(loaders) == 1 and not self.holds_out:
            self.validation_share = 0.0
        elif len(loaders) == 1 and not self.partition.fixed_train:
            _log.warning(
                "%s has neither val_dataloader nor test_dataloader: %g of its training items are held out for tests",
                type(own).__name__,
                self.test_share,
            )
        elif "validation" in loaders and not self._share_is_given:
            self.validation_share = 0.0
        names, self._classes = find_classes(self._sources, self.partition, self.labels, self.given_names)
        self._labeled, train = names is not None, torch.from_numpy(self._classes["train"][0])
        nothing = [None] if self.holds_out else self._classes["train"]  # for the rule's sake: see client_data
        tested = self._classes.get("test", self._classes.get("validation", nothing))[0]
        places = None if tested is None else torch.arange(len(tested))
        targets = None if tested is None else torch.from_numpy(tested)
        return Samples(torch.arange(len(train)), train, names or ("0",), places, targets)

    def client_data(self, client: int) -> ClientItems:  # type: ignore[override]  # splits of another kind
        """Splits of one client, made on demand without reading items.

        Args:
            client: Id from 0 to m - 1.

        Raises:
            IndexError: If there is no such client.
        """
        own = super().client_data(client)
        alone = len(self._sources) == 1 and self.holds_out  # no loader has items for evaluations
        held = {"validation": own.validation.indices, "test": own.test.indices if alone else own.test.indices[:0]}
        drawn: dict[str, Any] = {"test" if "test" in self._sources else "validation": own.test.indices}
        if self._validation is not None:
            drawn["validation"] = self._validation[client]
        if len(own.validation):  # a share that was asked for
            drawn.pop("validation", None)
        parts = {name: self._split(name, client, indices) for name, indices in drawn.items() if name in self._sources}
        classes = torch.from_numpy(self._classes["train"][0])
        assert self.held_source is not None
        found = {name: ItemSplit(self.held_source, indices, classes) for name, indices in held.items()} | parts
        return ClientItems(self._split("train", client, own.train.indices), **found)

    def _split(self, stage: str, client: int, indices: Any) -> Any:
        """A client's items of a stage, of all of its loaders."""
        own = [indices, *(lists[client] for lists in self._others[stage])]
        return joined(self._sources[stage], own, self._classes[stage], self._stages[stage].shape)

    def sources(self) -> Iterator[ItemSource]:
        """The data sets with their loaders' settings."""
        for sources in self._sources.values():
            yield from sources
        if self.held_source is not None:
            yield self.held_source
