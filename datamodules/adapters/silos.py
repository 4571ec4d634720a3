"""Clients that bring their own data: a data module, a loader or a data set each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pfl_lightning.data import checked_length
from pfl_lightning.datamodules.adapters.items import ClientItems, ItemDataModule, ItemSplit
from pfl_lightning.datamodules.adapters.labels import classes_of, dataset_of_all_classes, names_of_classes
from pfl_lightning.datamodules.adapters.sources import BatchSizes, ItemSource, evaluation_size, filled, source_of
from pfl_lightning.datamodules.adapters.stages import GivenLoaders, StageLoaders, loaders_of
from pfl_lightning.datamodules.adapters.streams import joined
from pfl_lightning.datamodules.adapters.user_data import read_dataset
from pfl_lightning.datamodules.adapters.workers import OneAtATime
from pfl_lightning.datamodules.clients.division import Division, check_batches, split_validation
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.counting import Ints, Parts, sizes_of
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.given import AsGiven
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.older_package import as_lightning
from pfl_lightning.options import DataOptions, Unpack


class FromSilos(ItemDataModule):
    """Data that are already divided: one LightningDataModule, DataLoader or Dataset for each client.

    Every client trains with its own loader's batch size, ``collate_fn``, ``drop_last``, shuffling and workers, under
    its own data module's hooks. It is evaluated on all items of its own validation and test loaders. Without a
    validation loader, a share of its training items is held out; without a test loader, it has no test split.

    A loader with a sampler or a batch sampler of the user's, without a batch size, or over an IterableDataset, is used
    as it is, from its beginning in every epoch; nothing of it is held out.

    Attributes that this module does not have are looked up in the first data module.

    All of this holds under :func:`~pfl_lightning.federate`. The package's own methods
    (:class:`~pfl_lightning.Federation`, ``pfl fit``) need Datasets whose items are pairs (input, class), all inputs of
    one shape. They are read once into tensors, as by :class:`FromDatasets` with ``clients``: without ``test_silos``, a
    share of each client's items (``test_share``) is held out for tests.

    Args:
        silos: The data of client 0, of client 1, and so on. A Dataset is for training.
        batch_size: Items in a batch of clients that bring a Dataset.
        test_silos: The test Dataset of each client that brings a Dataset, None for a client without tests; an empty
            list for none.
        client_names: A name for each client, such as those of hospitals.
        kwargs: ``validation_share``, of the training items of clients without a validation loader, ``novel_clients``
            and ``seed``; for the package's own methods, the others of :class:`FederatedDataModule`.

    Raises:
        ValueError: If there are no silos, one of them is no data of a client, or names or tests are not one a client.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> hospital, practice = [0.1, 0.2, 0.3, 0.4], [0.5, 0.6]
        >>> data = FromSilos([hospital, DataLoader(practice, batch_size=2)], validation_share=0.25)
        >>> data.setup()
        >>> [len(data.client_data(client).train) for client in range(data.num_clients)]
        [3, 1]
    """

    read_once = ("_silos", "_test_silos")

    def __init__(
        self,
        # Without a type of items, as in FromDatasets: a config may name them.
        silos: Sequence[Dataset | DataLoader | LightningDataModule | Sequence[Any]],  # type: ignore[type-arg]
        *,
        batch_size: int = 50,
        test_silos: Sequence[Dataset | Sequence[Any] | None] = (),  # type: ignore[type-arg]
        client_names: Sequence[str] = (),
        **kwargs: Unpack[DataOptions],
    ) -> None:
        if not silos:
            raise ValueError("there are no silos: give one LightningDataModule, DataLoader or Dataset for each client")
        if len(test_silos) not in (0, len(silos)):
            raise ValueError(f"test_silos must have an entry for each of {len(silos)} silos, got {len(test_silos)}")
        self._silos, self._test_silos = list(silos), list(test_silos) or [None] * len(silos)
        owners = [
            as_datamodule(silo, client, batch_size, test)
            for client, (silo, test) in enumerate(zip(self._silos, self._test_silos, strict=True))
        ]
        super().__init__(AsGiven(len(silos), client_names), owners, batch_size, **kwargs)
        self.tensor_options = sorted(kwargs.keys() - {"validation_share", "novel_clients", "seed"})
        self._whole = bool(self.tensor_options)  # whether samples are tensors, not items that are read when needed
        self._sizes = self.batch_size, self.eval_batch_size
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
        """Restore the states of the data modules."""
        for client, state in state_dict.items():
            self._owners[int(client)].load_state_dict(state)

    def setup(self, stage: str | None = None) -> None:
        """Load the data, as tensors where the Trainer's module is a federation that trains no user's module."""
        takes_items = getattr(getattr(self.trainer, "lightning_module", None), "takes_items", None)
        if takes_items is not None:
            self._hold(whole=not takes_items)
        super().setup(stage)

    def read_whole(self) -> None:
        """Read all items once, as the package's own methods need them."""
        self._hold(whole=True)
        self.setup()

    def _hold(self, whole: bool) -> None:
        if whole != self._whole:
            self.release()
            self._whole, self._ready = whole, None
            self._recent.clear()

    def load(self) -> Samples:
        """Set up the data modules; the samples are the positions of the items, one client's after another's.

        Raises:
            TypeError: If a loader is no DataLoader; a note names the client.
            PartitionError: If ``drop_last`` leaves a client no batch.
            ConfigurationError: If items are needed as tensors, and a silo is no Dataset of pairs (input, class).
        """
        for kept in (self._sources, self._shapes, self._batches, self._classes):
            kept.clear()  # type: ignore[attr-defined]
        if self._whole:
            self._labeled, (self.batch_size, self.eval_batch_size) = True, self._sizes
            return samples_of(self._silos, self._test_silos, lambda client: self.partition.named([client]))
        for client, silo in enumerate(self._owners):
            try:
                loaders = loaders_of(silo, self.trainer, streams=True)
            except Exception as error:  # of the user's own code, which may not say whose data it has read
                error.add_note(f"while the data of client {self.partition.named([client])} were set up")
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
                    checked_length(source.dataset, f"{name} set of client {self.partition.named([client])}")
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
        if self._whole:
            return super()._divide(samples)
        labels, sizes = samples.train_targets.numpy(), sizes_of(self._items("train"))
        whole = Parts(np.arange(len(labels)), sizes)
        train, validation = map(list, split_validation(labels, whole, self.validation_share, self.seed))
        for client, sources in enumerate(self._sources):
            if "validation" in sources or sources["train"][0].is_read_whole:
                train[client], validation[client] = whole[client], whole[client][:0]
        sizes = sizes_of(self._items("test"))
        test, none = Parts(np.arange(sizes.sum()), sizes), Parts(sizes[:0], 0 * sizes)
        found = Division(samples, Parts.of(train), Parts.of(validation), test, none, ())
        check_batches(found, np.array([own.batch_size * own.drop_last for own in self._batches]), self.client_names)
        return found

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, where all items are read."""
        return tuple(self._loaded.samples.train_inputs.shape[1:]) if self._whole else super().input_shape

    def client_data(self, client: int) -> Any:  # splits of one kind or another
        """Splits of one client, made on demand without reading items.

        Args:
            client: Id from 0 to m - 1.

        Raises:
            IndexError: If there is no such client.
        """
        own = super().client_data(client)
        if self._whole:
            return own
        sources, classes = self._sources[client], self._classes[client]
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


def samples_of(silos: Sequence[Any], tests: Sequence[Any], named: Callable[[int], str]) -> Samples:
    """Items of clients' Datasets as tensors, one client's after another's.

    Args:
        silos: The training Dataset of each client.
        tests: The test Dataset of each client; None for none.
        named: A client's number with its name.

    Raises:
        ConfigurationError: If one is no Dataset of pairs (input, class), or inputs differ in shape; names the client.
    """
    read: list[dict[str, tuple[Tensor, Tensor, Tensor]]] = [{}, {}]
    for sets, part, given in ((read[0], "data set", silos), (read[1], "test set", tests)):
        for client, own in ((client, own) for client, own in enumerate(given) if own is not None):
            what = f"{part} of client {named(client)}"
            try:
                inputs, targets = _read(own, what, next(iter(read[0].values()), (None,))[0], named(0))
            except (TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"{error}; the package's own methods need one Dataset for each client, with items "
                    "(input, class) of one shape: pass these, or federate a LightningModule, which takes any "
                    "loader"
                ) from error
            sets[what] = inputs, targets, torch.full((len(targets),), client)
    numbers = {what: targets.numpy() for sets in read for what, (_, targets, _) in sets.items()}
    names = names_of_classes(None, dataset_of_all_classes(silos), numbers, refuse=True)
    train, test = ([torch.cat(column) for column in zip(*sets.values(), strict=True)] for sets in read)
    samples = Samples(train[0], train[1], names, train_clients=train[2])
    return replace(samples, test_inputs=test[0], test_targets=test[1], test_clients=test[2]) if test else samples


def _read(own: Any, what: str, like: Tensor | None, whose: str) -> tuple[Tensor, Tensor]:
    """Inputs and classes of a data set, of the kind of others that were read before."""
    if isinstance(own, DataLoader | LightningDataModule):
        raise TypeError(f"the {what} is a {type(own).__name__}, expected a Dataset")
    inputs, targets = read_dataset(own, what)
    if like is not None and (inputs.shape[1:], inputs.dtype) != (like.shape[1:], like.dtype):
        raise ValueError(
            f"inputs of the {what} are {inputs.dtype} of shape {tuple(inputs.shape[1:])}, those of client {whose} "
            f"{like.dtype} of shape {tuple(like.shape[1:])}"
        )
    return inputs, targets


def as_datamodule(silo: Any, client: int, batch_size: int, test: Any = None) -> LightningDataModule:
    """The data of one client as a data module.

    Args:
        silo: A LightningDataModule, a DataLoader or a Dataset.
        client: Number of the client.
        batch_size: Items in a batch of a Dataset.
        test: The test items of a Dataset; None for none.

    Raises:
        ValueError: It is none of these, or its test items come beside loaders.
    """
    silo = as_lightning(silo)  # which may be of pytorch_lightning
    tests = None if test is None else DataLoader(test, batch_size)
    if tests is not None and isinstance(silo, LightningDataModule | DataLoader):
        raise ValueError(
            f"test_silos has test items of client {client}, whose silo is a {type(silo).__name__}: add "
            "a test loader to a LightningDataModule, or use Datasets in silos and test_silos"
        )
    if isinstance(silo, LightningDataModule) and not isinstance(silo, FederatedDataModule):
        return silo
    if isinstance(silo, DataLoader):
        return GivenLoaders(silo)
    if isinstance(silo, IterableDataset):
        return GivenLoaders(DataLoader(silo, batch_size), test=tests)
    several = isinstance(silo, list | tuple) and all(isinstance(part, DataLoader | Dataset) for part in silo)
    indexed = hasattr(silo, "__getitem__") and hasattr(silo, "__len__") and not isinstance(silo, str | dict)
    if several or not indexed or len(silo) == 0:
        raise ValueError(
            f"silo {client} is a {type(silo).__name__}, expected the data of one client: a LightningDataModule with "
            "its training, validation and test loaders, a DataLoader, or a Dataset with items"
        )
    return GivenLoaders(DataLoader(silo, batch_size, shuffle=True), test=tests)
