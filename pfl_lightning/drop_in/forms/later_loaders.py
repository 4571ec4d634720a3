"""Loaders for an evaluation that come after the data were divided: ``trainer.test(module, loader)`` after a fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule

from pfl_lightning.datamodules import FromLoaders, Partitioner
from pfl_lightning.datamodules.adapters.item_datamodule import ClientItems
from pfl_lightning.datamodules.adapters.item_source import ItemSource
from pfl_lightning.datamodules.adapters.items import ItemSplit
from pfl_lightning.datamodules.adapters.labels import classes_of
from pfl_lightning.datamodules.adapters.loading.stages import GivenLoaders, loaders_of
from pfl_lightning.datamodules.adapters.sources import source_of
from pfl_lightning.errors import ConfigurationError

__all__ = ["with_loaders"]

_PARTS = {"val_dataloaders": "validation", "test_dataloaders": "test"}


class _WithParts(LightningDataModule):
    """Data of a federation with other splits for an evaluation; all else is as it was.

    Args:
        data: The data.
        parts: Splits of all clients by kind (``test``).
        eval_batch_size: Items in a batch of them.
    """

    def __init__(self, data: FromLoaders, parts: Mapping[str, list[ItemSplit]], eval_batch_size: int) -> None:
        super().__init__()
        self.divided, self.parts, self.eval_batch_size = data, parts, eval_batch_size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "divided" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.divided, name)

    def release(self) -> None:
        """End the processes that read items."""
        self.divided.release()
        for splits in self.parts.values():
            if splits[0].source.workers is not None:
                splits[0].source.workers.close()

    def client_data(self, client: int) -> ClientItems:
        """Splits of one client."""
        changed: dict[str, Any] = {name: splits[client] for name, splits in self.parts.items()}
        return replace(self.divided.client_data(client), **changed)

    def val_dataloader(self) -> Any:
        """The evaluated clients."""
        return self.divided.val_dataloader()

    test_dataloader = val_dataloader


def with_loaders(data: Any, loaders: Mapping[str, Any]) -> Any:
    """The same clients with the items of another loader for their validation or test.

    Each client gets items in the class proportions of its training items, drawn as they are for a loader that is known
    before the data are divided.

    Args:
        data: The divided data.
        loaders: Loaders by their names in ``trainer.validate`` and ``trainer.test``.

    Raises:
        ConfigurationError: The data are not one loader's.
    """
    if isinstance(data, _WithParts):
        data = data.divided
    if not isinstance(data, FromLoaders):
        raise ConfigurationError(
            f"the Trainer was given {', '.join(loaders)}, and the clients' data are of a {type(data).__name__}: give "
            "it to the Trainer as for trainer.fit, its own loaders are used"
        )
    parts, size = {}, 1
    for name, given in loaders.items():
        of_the_call = GivenLoaders(given)  # which has no hooks, as in a plain run
        found = loaders_of(of_the_call)["train"]
        if len(found.loaders) > 1:
            raise ConfigurationError(
                f"{name} has {len(found.loaders)} loaders, and the data were divided without them: give them in a data "
                "module, or to federate, before the data are divided"
            )
        parts[_PARTS[name]] = _splits(data, source_of(found.first, of_the_call, "test"), found.first)
        size = int(found.first.batch_size or 1)
    return _WithParts(data, parts, size)


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
