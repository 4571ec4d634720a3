"""Clients that bring their own data: a data module, a loader or a data set each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pfl_lightning.data import checked_length
from pfl_lightning.datamodules.adapters.items import ClientItems, ItemDataModule, ItemSplit
from pfl_lightning.datamodules.adapters.labels import classes_of, dataset_of_all_classes, known_names
from pfl_lightning.datamodules.adapters.sources import BatchSizes, ItemSource, filled, source_of
from pfl_lightning.datamodules.adapters.stages import GivenLoaders, StageLoaders, for_another_process, loaders_of
from pfl_lightning.datamodules.adapters.streams import CombinedSplit, StreamSplit
from pfl_lightning.datamodules.adapters.workers import OneAtATime
from pfl_lightning.datamodules.clients.division import split_validation
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.counting import Ints, split_by_sizes
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError
from pfl_lightning.older_package import as_lightning


class FromSilos(ItemDataModule):
    """Data that are divided already: one LightningDataModule, DataLoader or Dataset a client.

    Every client trains with its own loader's batch size, ``collate_fn``, ``drop_last``, shuffling and workers, under
    its own data module's hooks. It is evaluated on all items of its own validation and test loaders. Without a
    validation loader, a share of its training items is held out; without a test loader, it has no test split.

    A loader with a sampler or a batch sampler of the user's, without a batch size, or over an IterableDataset, is used
    as it is, from its beginning in every epoch; nothing of it is held out.

    Attributes that this module does not have are looked up in the first data module.

    Args:
        silos: The data of client 0, of client 1, and so on. A Dataset is for training.
        batch_size: Items in a batch of clients that bring a Dataset.
        validation_share: Share of the training items that is held out at clients without a validation loader.
        novel_clients: See :class:`FederatedDataModule`.
        seed: Seed of what is held out.

    Raises:
        ValueError: If there are no silos, or one of them is no data of a client.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> hospital, practice = [0.1, 0.2, 0.3, 0.4], [0.5, 0.6]
        >>> data = FromSilos([hospital, DataLoader(practice, batch_size=2)], validation_share=0.25)
        >>> data.setup()
        >>> [len(data.client_data(client).train) for client in range(data.num_clients)]
        [3, 1]
    """

    def __init__(
        self,
        silos: Sequence[Any],
        *,
        batch_size: int = 50,
        validation_share: float = 0.1,
        novel_clients: int | float = 0,
        seed: int = 0,
    ) -> None:
        if not silos:
            raise ValueError("there are no silos: give one LightningDataModule, DataLoader or Dataset a client")
        super().__init__(
            AsGiven(len(silos)), batch_size, validation_share=validation_share, novel_clients=novel_clients, seed=seed
        )
        self.silos = [as_datamodule(silo, client, batch_size) for client, silo in enumerate(silos)]
        self._sources: list[dict[str, tuple[ItemSource, ...]]] = []
        self._shapes: list[dict[str, CombinedLoader | None]] = []
        self._batches: list[BatchSizes] = []
        self._classes: list[dict[str, list[Tensor]]] = []
        self._starts: list[int] = []
        self._turns: dict[str, list[OneAtATime]] = {}
        self._labeled = False

    def __getattr__(self, name: str) -> Any:
        """Attribute of the first data module, such as its vocabulary."""
        own = self.__dict__.get("silos")
        if not own or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(own[0], name)

    def __getstate__(self) -> dict[str, Any]:
        """State without Trainers."""
        silos = [for_another_process(silo, self._ready is not None) for silo in self.silos]
        return {**super().__getstate__(), "silos": silos}

    def state_dict(self) -> dict[str, Any]:
        """What the data modules keep in checkpoints, by their numbers."""
        found = {str(client): silo.state_dict() for client, silo in enumerate(self.silos)}
        return {client: state for client, state in found.items() if state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the data modules what they had kept."""
        for client, state in state_dict.items():
            self.silos[int(client)].load_state_dict(state)

    def prepare_data(self) -> None:
        """Prepare the data modules."""
        for silo in self.silos:
            silo.prepare_data()

    def load(self) -> Samples:
        """Set up the data modules; the samples are the positions of the items, one client's after another's.

        Raises:
            TypeError: If a loader is no DataLoader; a note names the client.
            PartitionError: If ``drop_last`` leaves a client no batch.
        """
        for client, silo in enumerate(self.silos):
            try:
                loaders = loaders_of(silo, self.trainer, streams=True)
            except Exception as error:  # of the user's own code, which may not say whose data it has read
                error.add_note(f"while the data of client {client} were set up")
                raise
            self._add(client, silo, loaders)
        self.batch_size, self.eval_batch_size = self._batches[0].batch_size, self._batches[0].eval_batch_size
        names = self._find_classes()
        tested = [own["test"][0] if "test" in own else torch.empty(0, dtype=torch.int64) for own in self._classes]
        self._divide([own["train"][0] for own in self._classes], [len(own) for own in tested])
        targets, test_targets = torch.cat([own["train"][0] for own in self._classes]), torch.cat(tested)
        positions = torch.arange(len(targets))
        if not len(test_targets):
            return Samples(positions, targets, names)
        return Samples(positions, targets, names, torch.arange(len(test_targets)), test_targets)

    def _add(self, client: int, silo: LightningDataModule, loaders: dict[str, StageLoaders]) -> None:
        """Note what a client brings."""
        own: dict[str, tuple[ItemSource, ...]] = {}
        for name, found in loaders.items():
            turns = self._turns.setdefault(name, [])
            turns.extend(OneAtATime() for _ in found.loaders[len(turns) :])
            own[name] = tuple(source_of(loader, silo, name, turns[n]) for n, loader in enumerate(found.loaders))
            for source in own[name]:
                if hasattr(source.dataset, "__len__"):
                    checked_length(source.dataset, f"{name} set of client {client}")
        self._sources.append(own)
        self._shapes.append({name: found.shape for name, found in loaders.items()})
        evaluated = own.get("validation", own.get("test", own["train"]))[0].batches
        self._batches.append(replace(own["train"][0].batches, eval_batch_size=evaluated.eval_batch_size))

    def _find_classes(self) -> tuple[str, ...]:
        """Names of the classes, if all data sets tell them without being read."""
        found = [
            {name: [classes_of(s.dataset, read=False) for s in sources] for name, sources in own.items()}
            for own in self._sources
        ]
        sets = {f"{name} set of client {k}": of for k, own in enumerate(found) for name, of in own.items()}
        names: tuple[str, ...] | None = None
        if all(classes is not None for of in sets.values() for classes in of):
            named = dataset_of_all_classes([own["train"][0].dataset for own in self._sources])
            joined = {name: np.concatenate([one for one in of if one is not None]) for name, of in sets.items()}
            names = known_names(None, named, joined)
        self._labeled = names is not None
        for sources, own in zip(self._sources, found, strict=True):
            arrays = filled(sources, own, self._labeled)
            self._classes.append({name: [torch.from_numpy(array) for array in of] for name, of in arrays.items()})
        return names or ("0",)

    def _divide(self, classes: list[Tensor], test_sizes: list[int]) -> None:
        """Tell the rule which positions are whose."""
        sizes, labels = np.array([len(own) for own in classes]), torch.cat(classes).numpy()
        whole = split_by_sizes(np.arange(len(labels)), sizes)
        train, validation = split_validation(labels, whole, self.validation_share, self.seed)
        for client, sources in enumerate(self._sources):
            if "validation" in sources or _is_read_whole(sources["train"][0]):
                train[client], validation[client] = whole[client], whole[client][:0]
        for client in range(len(train)):
            own = self._batches[client]
            if own.drop_last and len(train[client]) < own.batch_size:
                raise PartitionError(
                    f"drop_last leaves client {client} no batch: it has {len(train[client])} training samples, its "
                    f"batch_size is {own.batch_size}; lower it to at most {len(train[client])}"
                )
        test = split_by_sizes(np.arange(sum(test_sizes)), np.array(test_sizes))
        assert isinstance(self.partition, AsGiven)
        self.partition.train, self.partition.validation, self.partition.test = train, validation, test
        self._starts = [int(own[0]) for own in whole]

    def client_data(self, client: int) -> ClientItems:  # type: ignore[override]  # splits of another kind
        """Splits of one client, made on demand without reading items.

        Args:
            client: Id from 0 to m - 1.

        Raises:
            IndexError: If there is no such client.
        """
        own = super().client_data(client)
        start, sources = self._starts[client], self._sources[client]
        train, held = own.train.indices - start, own.validation.indices - start
        classes = self._classes[client]
        if "validation" in sources:
            validation = self._split(client, "validation", torch.arange(len(classes["validation"][0])))
        else:
            validation = ItemSplit(sources["train"][0], held, classes["train"][0])
        test = ItemSplit(sources["train"][0], held[:0], classes["train"][0])
        if "test" in sources:
            test = self._split(client, "test", torch.arange(len(own.test.indices)))
        return ClientItems(self._split(client, "train", train), validation, test, self._batches[client])

    def _split(self, client: int, stage: str, indices: Tensor) -> Any:
        """A client's items of a stage, of all of its loaders; of the first those that are named."""
        classes, sources = self._classes[client][stage], self._sources[client][stage]
        each = [indices, *(torch.arange(len(other)) for other in classes[1:])]
        parts = [
            (StreamSplit if _is_read_whole(source) else ItemSplit)(source, own, of)
            for source, own, of in zip(sources, each, classes, strict=True)
        ]
        shape = self._shapes[client][stage]
        return parts[0] if shape is None else CombinedSplit(parts, shape)

    def sources(self) -> Iterator[ItemSource]:
        """The data sets with their loaders' settings."""
        for own in self._sources:
            for sources in own.values():
                yield from sources


def _is_read_whole(source: ItemSource) -> bool:
    """Whether items come from a loader or stream of the client's as it is, in which they have no numbers."""
    return source.loader is not None or isinstance(source.dataset, IterableDataset)


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
    silo = as_lightning(silo)  # which may be of pytorch_lightning
    if isinstance(silo, LightningDataModule) and not isinstance(silo, FederatedDataModule):
        return silo
    if isinstance(silo, DataLoader):
        return GivenLoaders(silo)
    if isinstance(silo, IterableDataset):
        return GivenLoaders(DataLoader(silo, batch_size))
    several = isinstance(silo, list | tuple) and all(isinstance(part, DataLoader | Dataset) for part in silo)
    indexed = hasattr(silo, "__getitem__") and hasattr(silo, "__len__") and not isinstance(silo, str | dict)
    if several or not indexed or len(silo) == 0:
        raise ValueError(
            f"silo {client} is a {type(silo).__name__}, expected the data of one client: a LightningDataModule with "
            "its training, validation and test loaders, a DataLoader, or a Dataset with items"
        )
    return GivenLoaders(DataLoader(silo, batch_size, shuffle=True))
