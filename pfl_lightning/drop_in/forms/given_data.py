"""The data of a federation, from what a project would give to its Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset

from pfl_lightning.datamodules import IID, FederatedDataModule, FromLoaders, FromSilos, Partitioner
from pfl_lightning.datamodules.adapters.loading.stages import GivenLoaders, brings
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.older_package import is_older

__all__ = ["Division", "LoadersByStage", "brings_stream", "data_of", "is_of_module", "streams_of"]

HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader")
"""Where a LightningModule brings loaders of its own."""


@dataclass(frozen=True)
class LoadersByStage:
    """Loaders without a data module, each with its name in ``trainer.fit``.

    Attributes:
        train: A loader, or a list of one a client.
        validation: The same for validation batches; ``None`` for none.
        test: The same for test batches; ``None`` for none.
    """

    train: Any = None
    validation: Any = None
    test: Any = None

    def named(self) -> dict[str, Any]:
        """Those that are given."""
        own = {"train_dataloaders": self.train, "val_dataloaders": self.validation, "test_dataloaders": self.test}
        return {name: loader for name, loader in own.items() if loader is not None}


@dataclass(frozen=True)
class Division:
    """How data are divided among clients.

    Attributes:
        partition: A rule.
        num_clients: Number of clients of an even random division, where there is no rule.
        labels: Gives the class of an item.
        shared_evaluation: Whether every client is evaluated on all items.
    """

    partition: Any = None
    num_clients: int | None = None
    labels: Callable[[Any], Any] | None = None
    shared_evaluation: bool = False

    @property
    def is_given(self) -> bool:
        """Whether anything is said."""
        given = (self.partition, self.num_clients, self.labels)
        return self.shared_evaluation or any(each is not None for each in given)


def data_of(
    given: Any,
    loaders: LoadersByStage,
    division: Division,
    module: L.LightningModule | None = None,
    evaluates: bool = True,
) -> FederatedDataModule:
    """Divide a project's data among clients.

    As in a Trainer, loaders that are not given are those of the module itself, unless there is a data module.

    Args:
        given: A data module, a loader, or a list with the data of each client; ``None`` where loaders are given by
            name, or are the module's own.
        loaders: Loaders given by name.
        division: Who gets what.
        module: The LightningModule, which may bring loaders.
        evaluates: Whether the method evaluates clients in a way of its own. If not, nothing is held out for a module
            without steps for it: a plain Trainer would evaluate nothing, and train on all items.

    Raises:
        ConfigurationError: They are no data, they contradict each other, or it is not said who gets what.
    """
    own = module if module is not None and any(brings(module, name) for name in HOOKS) else None
    if loaders.named():
        given = _from_loaders(given, loaders, division, own)
    elif isinstance(given, DataLoader | CombinedLoader | dict):
        given = GivenLoaders(given, module=own)
    elif given is None and own is not None and brings(own, HOOKS[0]):
        if division.num_clients is not None and division.partition is None and brings_stream(own):
            return streams_of(own, division.num_clients)
        given = GivenLoaders(module=own)
    if isinstance(given, FederatedDataModule | list | tuple):
        if division.is_given:
            name = type(given).__name__
            what = name if isinstance(given, FederatedDataModule) else f"a {name} with the data of each client"
            raise ConfigurationError(
                f"{what} is divided among clients already: leave out partition, num_clients, labels and "
                "shared_evaluation"
            )
        return given if isinstance(given, FederatedDataModule) else _silos(given)
    if not isinstance(given, LightningDataModule) and not is_older(given):
        nothing = "nothing, and the module has no train_dataloader of its own"
        raise ConfigurationError(
            "expected a LightningDataModule, a DataLoader, or a list with the data of each client, got "
            f"{nothing if given is None else type(given).__name__}"
        )
    data = FromLoaders(_rule(division), datamodule=given, labels=division.labels)
    data.shared_evaluation = division.shared_evaluation
    data.holds_out = evaluates or module is None or brings(module, "validation_step") or brings(module, "test_step")
    return data


def _rule(division: Division) -> Partitioner:
    partition, num_clients = division.partition, division.num_clients
    if (partition is None) == (num_clients is None):
        raise ConfigurationError(
            "give either partition, a rule of pfl_lightning.datamodules, or num_clients for an even random division; "
            f"got partition={partition!r}, num_clients={num_clients!r}"
        )
    rule = IID(num_clients) if partition is None and num_clients is not None else partition
    if not isinstance(rule, Partitioner):
        raise ConfigurationError(f"partition must be a rule of pfl_lightning.datamodules, got {rule!r}")
    return rule


def _from_loaders(given: Any, loaders: LoadersByStage, division: Division, module: L.LightningModule | None) -> Any:
    """One data module of loaders, or one for each client where they are lists of one a client."""
    plain = isinstance(given, DataLoader | CombinedLoader | dict) or (
        isinstance(given, list | tuple) and all(isinstance(loader, DataLoader) for loader in given)
    )
    trains = module is not None and brings(module, HOOKS[0])
    if (given is not None and (not plain or loaders.train is not None)) or (
        given is loaders.train is None and not trains
    ):
        names = ", ".join(loaders.named())
        raise ConfigurationError(
            f"got {names} and {'no loader for training' if given is None else f'a {type(given).__name__}'}: give "
            "either a LightningDataModule, or train_dataloaders with val_dataloaders and test_dataloaders where there "
            "are some"
        )
    found = LoadersByStage(loaders.train if given is None else given, loaders.validation, loaders.test)
    if not isinstance(found.train, list | tuple) or division.is_given:
        return GivenLoaders(found.train, found.validation, found.test, module=module)
    number = len(found.train)
    for name, own in found.named().items():
        if not isinstance(own, list | tuple) or len(own) != number:
            got = len(own) if isinstance(own, list | tuple) else f"a {type(own).__name__}"
            raise ConfigurationError(
                f"there are {number} loaders for training, one a client, and {name} is {got}: give {number}, too, or "
                "num_clients for one loader that is divided among clients"
            )
    nothing = [None] * number
    each = zip(found.train, found.validation or nothing, found.test or nothing, strict=True)
    return [GivenLoaders(*own) for own in each]


def _silos(given: Sequence[Any]) -> FromSilos:
    try:
        return FromSilos(given)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


class _StreamOfModule(IterableDataset[Any]):
    """Stands for the stream of whichever copy of the module is trained."""

    def __iter__(self) -> NoReturn:
        raise ConfigurationError(
            "the module's train_dataloader gives an IterableDataset, of which each client has its own, read in its "
            "local fits alone and by an inner Trainer: use TrainerEngine, and a method that reads no training data "
            "beside the steps (FedAvg, FedPer with head=, ...), or give a list of data sets, one a client"
        )


def brings_stream(module: L.LightningModule) -> bool:
    """Whether a module's own training loader is over an IterableDataset.

    It is asked for before ``prepare_data`` and ``setup``: not where the module has one of these.
    """
    if not brings(module, "train_dataloader") or brings(module, "setup") or brings(module, "prepare_data"):
        return False
    with isolate_rng(include_cuda=False):
        try:
            loader = module.train_dataloader()
        except Exception:  # whatever the user's code raises without a Trainer
            return False
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def streams_of(module: L.LightningModule, num_clients: int) -> FromSilos:
    """Data of clients that each have the stream of their own copy of a module.

    Args:
        module: The module, whose validation and test loaders each client has whole.
        num_clients: Number of clients m.
    """
    stands = DataLoader(_StreamOfModule())
    return FromSilos([GivenLoaders(stands, module=module) for _ in range(num_clients)])


def is_of_module(part: Any) -> bool:
    """Whether a client's training part is the module's own stream."""
    return isinstance(getattr(getattr(part, "source", None), "dataset", None), _StreamOfModule)
