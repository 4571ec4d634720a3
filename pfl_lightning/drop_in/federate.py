"""One call that makes a federation of a Lightning project."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch import LightningDataModule

from pfl_lightning.callbacks.loop import FederatedLoop
from pfl_lightning.client import FederatedClient
from pfl_lightning.datamodules import IID, FederatedDataModule, FromLoaders, FromSilos, Partitioner
from pfl_lightning.drop_in.federation import ModuleFederation
from pfl_lightning.engines import Engine
from pfl_lightning.errors import ConfigurationError

__all__ = ["federate"]

Method = type[FederatedClient] | partial[FederatedClient]


def federate(
    module: L.LightningModule,
    datamodule: LightningDataModule | Sequence[Any],
    method: Method,
    partition: Partitioner | None = None,
    *,
    num_clients: int | None = None,
    head: str | Sequence[str] | None = None,
    monitor: str | None = None,
    labels: Callable[[Any], Any] | None = None,
    cohort: int | float = 1.0,
    engine: Engine | None = None,
    seed: int | None = None,
    **hyperparameters: Any,
) -> tuple[ModuleFederation, FederatedDataModule]:
    """Make a federation of a Lightning project, whose classes stay as they are.

    The two that come back take the places of the two that went in: ``trainer.fit(module, datamodule=data)`` trains the
    federation, ``max_epochs`` is its number of rounds, and callbacks and loggers see one epoch a round.

    Example:
        >>> module, data = federate(Net(), Data(), FedPer, num_clients=10)  # doctest: +SKIP
        >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
        >>> module, data = federate(Net(), [hospital, practice, office], FedPer)  # doctest: +SKIP

    Args:
        module: The LightningModule. Clients train copies; when a fit is over it holds the global model.
        datamodule: The LightningDataModule whose Datasets are divided; a list of LightningDataModules, DataLoaders or
            Datasets, one a client; or a FederatedDataModule as it is.
        method: A class of :mod:`pfl_lightning.methods` that needs no more of a model than its training step, or a
            partial of one.
        partition: The rule that says which client holds which items; ``None`` is IID over ``num_clients``.
        num_clients: Number of clients m, where no rule is given.
        head: Names or patterns of the layers that are the head (``"classifier"``, ``["fc.*", "norm"]``); ``None``
            guesses the last linear layer and says so.
        monitor: A value that the module logs, of which mean, deviation, least and greatest value over the clients are
            logged as ``<monitor>/mean`` and so on.
        labels: Gives the class of an item for the partition, where items are not pairs (input, class).
        cohort: How many clients take part in a round; for more, give the Trainer a FederatedLoop of your own.
        engine: How local fits run; ``None`` is :class:`~pfl_lightning.TrainerEngine`.
        seed: Seed of everything random; ``None`` takes what ``seed_everything`` set.
        hyperparameters: Of the method, such as ``epochs`` (local epochs a round, 1 by default) and ``mu``.

    Returns:
        The federation and its data.

    Raises:
        ConfigurationError: Says what of the project, or of the arguments, cannot be federated, and what to do.
    """
    made = partial(method, **hyperparameters) if hyperparameters else method
    federation = ModuleFederation(
        module, made, loop=FederatedLoop(cohort), head=head, monitor=monitor, engine=engine, seed=seed
    )
    return federation, _divided(datamodule, partition, num_clients, labels)


def _divided(
    datamodule: Any, partition: Partitioner | None, num_clients: int | None, labels: Callable[[Any], Any] | None
) -> FederatedDataModule:
    if isinstance(datamodule, FederatedDataModule | list | tuple):
        if partition is not None or num_clients is not None or labels is not None:
            what = type(datamodule).__name__
            given = what if isinstance(datamodule, FederatedDataModule) else f"a {what} with the data of each client"
            raise ConfigurationError(
                f"{given} is divided among clients already: leave partition, num_clients and labels away"
            )
        return datamodule if isinstance(datamodule, FederatedDataModule) else _silos(datamodule)
    if not isinstance(datamodule, LightningDataModule):
        raise ConfigurationError(
            f"expected a LightningDataModule, or a list with the data of each client, got {type(datamodule).__name__}; "
            "put the loaders of the project into a LightningDataModule"
        )
    if (partition is None) == (num_clients is None):
        raise ConfigurationError(
            "give either partition, a rule of pfl_lightning.datamodules, or num_clients for an even random division; "
            f"got partition={partition!r}, num_clients={num_clients!r}"
        )
    rule = IID(num_clients) if partition is None and num_clients is not None else partition
    if not isinstance(rule, Partitioner):
        raise ConfigurationError(f"partition must be a rule of pfl_lightning.datamodules, got {rule!r}")
    return FromLoaders(rule, datamodule=datamodule, labels=labels)


def _silos(given: Sequence[Any]) -> FromSilos:
    try:
        return FromSilos(given)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
