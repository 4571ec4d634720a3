"""The data of a federation, from what a project would give to its Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import lightning as L
import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset

from pfl_lightning.datamodules import IID, FederatedDataModule, FromLoaders, FromSilos, Partitioner
from pfl_lightning.datamodules.adapters.items import ClientItems, ItemSplit
from pfl_lightning.datamodules.adapters.labels import classes_of
from pfl_lightning.datamodules.adapters.sources import ItemSource, source_of
from pfl_lightning.datamodules.adapters.stages import GivenLoaders, brings, loaders_of
from pfl_lightning.drop_in.fits.module_calls import nothing
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.older_package import is_older

HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader")
"""Where a LightningModule brings loaders of its own."""

GIVEN = ("train_dataloaders", "val_dataloaders", "test_dataloaders")
"""How loaders without a data module are called, as in ``trainer.fit``: a loader, or a list of one a client."""

_PARTS = {"val_dataloaders": "validation", "test_dataloaders": "test"}


def data_of(
    given: Any,
    loaders: Mapping[str, Any],
    module: L.LightningModule,
    *,
    partition: Any = None,
    num_clients: int | None = None,
    labels: Callable[[Any], Any] | None = None,
    shared_evaluation: bool = False,
    evaluates: bool = True,
) -> FederatedDataModule:
    """Divide a project's data among clients.

    As in a Trainer, loaders that are not given are those of the module itself, unless there is a data module.

    Args:
        given: A data module, a loader, or a list with the data of each client; ``None`` where loaders are given by
            name, or are the module's own.
        loaders: Loaders given by name; ``None`` for none.
        module: The LightningModule, which may bring loaders.
        partition: A rule that says who gets what.
        num_clients: Number of clients of an even random division, where there is no rule.
        labels: Gives the class of an item.
        shared_evaluation: Whether every client is evaluated on all items.
        evaluates: Whether the method evaluates clients in a way of its own. If not, nothing is held out for a module
            without steps for it: a plain Trainer would evaluate nothing, and train on all items.

    Raises:
        ConfigurationError: They are no data, they contradict each other, or it is not said who gets what.
    """
    own = module if any(brings(module, name) for name in HOOKS) else None
    loaders = {name: loader for name, loader in loaders.items() if loader is not None}
    is_divided = shared_evaluation or any(each is not None for each in (partition, num_clients, labels))
    if loaders:
        given = _from_loaders(given, loaders, own, is_divided)
    elif isinstance(given, DataLoader | CombinedLoader | dict):
        given = GivenLoaders(given, module=own)
    elif given is None and own is not None and brings(own, HOOKS[0]):
        if num_clients is not None and partition is None and _brings_stream(own):
            # Each client has the stream of its own copy of the module, whose other loaders each has whole.
            given = [GivenLoaders(DataLoader(_StreamOfModule()), module=own) for _ in range(num_clients)]
            is_divided = False
        else:
            given = GivenLoaders(module=own)
    if isinstance(given, FederatedDataModule | list | tuple):
        if is_divided:
            raise ConfigurationError(
                f"{type(given).__name__} is already divided among clients, as is a list with the data of each: leave "
                "out partition, num_clients, labels and shared_evaluation"
            )
        if isinstance(given, FromSilos) and given.tensor_options:
            raise ConfigurationError(
                f"{', '.join(given.tensor_options)} of FromSilos: only the package's own methods use this; clients "
                "of a module use their Datasets and loaders: set it there"
            )
        return given if isinstance(given, FederatedDataModule) else FromSilos(given)
    if not isinstance(given, LightningDataModule) and not is_older(given):
        what = "nothing, and the module has no train_dataloader" if given is None else type(given).__name__
        raise ConfigurationError(
            f"expected a LightningDataModule, a DataLoader, or a list with the data of each client, got {what}"
        )
    rule = IID(num_clients) if partition is None and num_clients is not None else partition
    if not isinstance(rule, Partitioner) or (partition is not None and num_clients is not None):
        raise ConfigurationError(
            "give either partition, a rule of pfl_lightning.datamodules, or num_clients for an even random division; "
            f"got partition={partition!r}, num_clients={num_clients!r}"
        )
    data = FromLoaders(rule, datamodule=given, labels=labels)
    data.shared_evaluation = shared_evaluation
    data.holds_out = evaluates or brings(module, "validation_step") or brings(module, "test_step")
    return data


def _from_loaders(
    given: Any, loaders: Mapping[str, Any], module: L.LightningModule | None, is_divided: bool
) -> GivenLoaders | list[GivenLoaders]:
    """One data module of loaders, or one for each client where they are lists of one a client."""
    is_list = isinstance(given, list | tuple) and all(isinstance(loader, DataLoader) for loader in given)
    trains = is_list or isinstance(given, DataLoader | CombinedLoader | dict)
    found = {GIVEN[0]: given, **loaders} if trains else dict(loaders)
    own = found.get(GIVEN[0])
    if (given is not None and (not trains or GIVEN[0] in loaders)) or (
        own is None and (module is None or not brings(module, HOOKS[0]))
    ):
        raise ConfigurationError(
            f"got {', '.join(loaders)} and {'no loader for training' if given is None else f'a {type(given).__name__}'}"
            ": give either a LightningDataModule, or train_dataloaders, val_dataloaders and test_dataloaders"
        )
    if not isinstance(own, list | tuple) or is_divided:
        return GivenLoaders(*map(found.get, GIVEN), module=module)
    columns = [found.get(name) or [None] * len(own) for name in GIVEN]
    if any(not isinstance(column, list | tuple) or len(column) != len(own) for column in columns):
        raise ConfigurationError(
            f"there are {len(own)} training loaders, one for each client, and other loaders are not {len(own)}: pass a "
            "list of as many, or num_clients with one loader that is divided among clients"
        )
    return [GivenLoaders(*row) for row in zip(*columns, strict=True)]


class _StreamOfModule(IterableDataset[Any]):
    """Stands for the stream of whichever copy of the module is trained."""

    def __iter__(self) -> NoReturn:
        raise ConfigurationError(
            "the module's train_dataloader gives an IterableDataset; each client has its own, which only an inner "
            "Trainer reads, in local fits: use TrainerEngine and a method that reads training data only in its "
            "steps (FedAvg, FedPer with head=, ...), or pass a list of data sets, one for each client"
        )


def _brings_stream(module: L.LightningModule) -> bool:
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


def is_of_module(part: Any) -> bool:
    """Whether a client's training part is the module's own stream."""
    return isinstance(getattr(getattr(part, "source", None), "dataset", None), _StreamOfModule)


def with_loaders(data: Any, loaders: Mapping[str, Any]) -> FromLoaders:
    """The same clients with the items of another loader for their validation or test.

    Each client gets items in the class proportions of its training items, drawn as they are for a loader that is known
    before the data are divided.

    Args:
        data: The divided data.
        loaders: Loaders by their names in ``trainer.validate`` and ``trainer.test``.

    Raises:
        ConfigurationError: The data are not one loader's.
    """
    if not isinstance(data, FromLoaders):
        raise ConfigurationError(
            f"the Trainer was given {', '.join(loaders)}, but the clients' data are from a {type(data).__name__}, "
            f"which has its own loaders: pass that {type(data).__name__}, as in trainer.fit, and no loaders"
        )
    parts, size = {}, 1
    for name, given in loaders.items():
        of_the_call = GivenLoaders(given)  # which has no hooks, as in a plain run
        own = loaders_of(of_the_call)["train"]
        if len(own.loaders) > 1:
            raise ConfigurationError(
                f"{name} has {len(own.loaders)} loaders, but the data were divided without them: pass them in a data "
                "module, or to federate, before the data are divided"
            )
        parts[_PARTS[name]] = _splits(data, source_of(own.loaders[0], of_the_call, "test"), own.loaders[0])
        size = int(own.loaders[0].batch_size or 1)
    found = object.__new__(type(data))  # a copy would go without its loaders
    functions = {"client_data": partial(_client_data, data, parts), "release": partial(_release, data, parts)}
    vars(found).update(vars(data), prepare_data=nothing, setup=nothing, eval_batch_size=size, **functions)
    return found


def _client_data(data: FromLoaders, parts: Mapping[str, list[ItemSplit]], client: int) -> ClientItems:
    changed: dict[str, Any] = {name: splits[client] for name, splits in parts.items()}
    return replace(data.client_data(client), **changed)


def _release(data: FromLoaders, parts: Mapping[str, list[ItemSplit]]) -> None:
    """End the processes that read items."""
    data.release()
    for splits in parts.values():
        if splits[0].source.workers is not None:
            splits[0].source.workers.close()


def _splits(data: FromLoaders, source: ItemSource, loader: Any) -> list[ItemSplit]:
    rule = data.partition
    clients = [data.client_data(client) for client in range(data.num_clients)]
    known = classes_of(loader.dataset, data.labels, read=rule.needs_labels) if data._labeled else None
    classes = np.zeros(len(loader.dataset), dtype=np.int64) if known is None else known
    # Validation items that were set aside count, too: they are among those that the rule gave the client.
    own = [[c.train, *([c.validation] if c.validation.source is data.held_source else [])] for c in clients]
    held = [np.concatenate([split._classes[split.indices].numpy() for split in splits]) for splits in own]
    if known is None:
        held = [np.zeros_like(part) for part in held]
    if data.evaluates_on_all:
        return [ItemSplit(source, torch.arange(len(classes)), torch.from_numpy(classes))] * len(clients)
    # The test items that a file lists are those of the loader that it was written for.
    divide = partial(Partitioner.partition_test, rule) if rule.fixed_test else rule.partition_test
    found = divide(classes, held, data.test_samples_per_client)
    return [ItemSplit(source, torch.from_numpy(part), torch.from_numpy(classes)) for part in found]
