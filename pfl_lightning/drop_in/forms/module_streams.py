"""A training stream that the module brings and fills itself, such as the replay buffer of an agent: one a client."""

from __future__ import annotations

from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset

from pfl_lightning.datamodules import FromSilos
from pfl_lightning.datamodules.adapters.loading.stages import GivenLoaders, brings
from pfl_lightning.errors import ConfigurationError

__all__ = ["brings_stream", "is_of_module", "streams_of"]


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
