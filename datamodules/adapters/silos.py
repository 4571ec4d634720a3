"""Clients that bring their own data: a data module, a loader or a data set each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pfl_lightning.data import checked_length
from pfl_lightning.datamodules.adapters.items import ClientItems, ItemDataModule, ItemSplit
from pfl_lightning.datamodules.adapters.labels import classes_of, dataset_of_all_classes, names_of_classes
from pfl_lightning.datamodules.adapters.sources import BatchSizes, ItemSource, evaluation_size, filled, source_of
from pfl_lightning.datamodules.adapters.stages import GivenLoaders, StageLoaders, loaders_of
from pfl_lightning.datamodules.adapters.streams import joined
from pfl_lightning.datamodules.adapters.workers import OneAtATime
from pfl_lightning.datamodules.clients.division import Division, check_batches, split_validation
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.clients.views import ClientView
from pfl_lightning.datamodules.counting import Ints, sizes_of, split_by_sizes
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.given import AsGiven
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
        owners = [as_datamodule(silo, client, batch_size) for client, silo in enumerate(silos)]
        options: dict[str, Any] = {"novel_clients": novel_clients, "seed": seed}
        super().__init__(AsGiven(len(silos)), owners, batch_size, validation_share=validation_share, **options)
        self._sources: list[dict[str, tuple[ItemSource, ...]]] = []
        self._shapes: list[dict[str, CombinedLoader | None]] = []
        self._batches: list[BatchSizes] = []
        self._classes: list[dict[str, list[Ints]]] = []
        self._turns: dict[str, list[OneAtATime]] = {}
        self._labeled = False

    def state_dict(self) -> dict[str, Any]:
        """What the data modules keep in checkpoints, by their numbers."""
        found = {str(client): silo.state_dict() for client, silo in enumerate(self._owners)}
        return {client: state for client, state in found.items() if state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the data modules what they had kept."""
        for client, state in state_dict.items():
            self._owners[int(client)].load_state_dict(state)

    def load(self) -> Samples:
        """Set up the data modules; the samples are the positions of the items, one client's after another's.

        Raises:
            TypeError: If a loader is no DataLoader; a note names the client.
            PartitionError: If ``drop_last`` leaves a client no batch.
        """
        for client, silo in enumerate(self._owners):
            try:
                loaders = loaders_of(silo, self.trainer, streams=True)
            except Exception as error:  # of the user's own code, which may not say whose data it has read
                error.add_note(f"while the data of client {client} were set up")
                raise
            self._add(client, silo, loaders)
        self.batch_size, self.eval_batch_size = self._batches[0].batch_size, self._batches[0].eval_batch_size
        names = self._find_classes()
        targets, tested = (torch.from_numpy(np.concatenate(self._items(stage))) for stage in ("train", "test"))
        places = torch.arange(len(tested)) if len(tested) else None
        return Samples(torch.arange(len(targets)), targets, names, places, None if places is None else tested)

    def _items(self, stage: str) -> list[Ints]:
        """Classes of the items of each client's first loader of a stage."""
        return [own[stage][0] if stage in own else np.empty(0, dtype=np.int64) for own in self._classes]

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
        self._batches.append(replace(own["train"][0].batches, eval_batch_size=evaluation_size(own)))

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
            all_of_stage = {name: np.concatenate([one for one in of if one is not None]) for name, of in sets.items()}
            with suppress(ValueError):  # whole numbers that cannot be classes are none
                names = names_of_classes(None, named, all_of_stage)
        self._labeled = names is not None
        self._classes = [filled(*of, self._labeled) for of in zip(self._sources, found, strict=True)]
        return names or ("0",)

    def _divide(self, samples: Samples) -> Division:
        labels, sizes = samples.train_targets.numpy(), sizes_of(self._items("train"))
        whole = split_by_sizes(np.arange(len(labels)), sizes)
        train, validation = split_validation(labels, whole, self.validation_share, self.seed)
        for client, sources in enumerate(self._sources):
            if "validation" in sources or sources["train"][0].is_read_whole:
                train[client], validation[client] = whole[client], whole[client][:0]
        sizes = sizes_of(self._items("test"))
        test, none = split_by_sizes(np.arange(sizes.sum()), sizes), [own[:0] for own in whole]
        found = Division(samples, train, validation, test, none, tuple(ClientView() for _ in whole))
        check_batches(found, np.array([own.batch_size * own.drop_last for own in self._batches]))
        return found

    def client_data(self, client: int) -> ClientItems:  # type: ignore[override]  # splits of another kind
        """Splits of one client, made on demand without reading items.

        Args:
            client: Id from 0 to m - 1.

        Raises:
            IndexError: If there is no such client.
        """
        own, sources, classes = super().client_data(client), self._sources[client], self._classes[client]
        start = int(sizes_of(self._items("train"))[:client].sum())
        first = (sources["train"][0], torch.from_numpy(classes["train"][0]))
        held = own.validation.indices - start
        parts = {"validation": ItemSplit(first[0], held, first[1]), "test": ItemSplit(first[0], held[:0], first[1])}
        for stage, of in sources.items():
            each = [torch.arange(len(other)) for other in classes[stage]]
            if stage == "train":
                each[0] = own.train.indices - start
            parts[stage] = joined(of, each, classes[stage], self._shapes[client][stage])
        return ClientItems(**parts, batches=self._batches[client])

    def sources(self) -> Iterator[ItemSource]:
        """The data sets with their loaders' settings."""
        for own in self._sources:
            for sources in own.values():
                yield from sources


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
