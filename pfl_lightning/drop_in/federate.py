"""One call that makes a federation of a Lightning project."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch import LightningDataModule

from pfl_lightning.callbacks.loop import FederatedLoop
from pfl_lightning.client import FederatedClient
from pfl_lightning.datamodules import IID, FederatedDataModule, FromLoaders, Partitioner
from pfl_lightning.drop_in.copies import Factory
from pfl_lightning.drop_in.federation import ModuleFederation
from pfl_lightning.engines import Engine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.older_package import as_older, is_older

__all__ = ["federate"]

Method = type[FederatedClient] | partial[FederatedClient]


def federate(
    module: L.LightningModule,
    datamodule: LightningDataModule,
    method: Method,
    partition: Partitioner | None = None,
    *,
    num_clients: int | None = None,
    head: str | Sequence[str] | None = None,
    monitor: str | None = None,
    labels: Callable[[Any], Any] | None = None,
    module_factory: Factory | None = None,
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

    Args:
        module: The LightningModule. Clients train copies; when a fit is over it holds the global model. Where it is
            of the package pytorch_lightning, Trainers of either package fit the federation.
        datamodule: The LightningDataModule whose Datasets are divided, or a FederatedDataModule as it is.
        method: A class of :mod:`pfl_lightning.methods` that needs no more of a model than its training step, or a
            partial of one.
        partition: The rule that says which client holds which items; ``None`` is IID over ``num_clients``.
        num_clients: Number of clients m, where no rule is given.
        head: Names or patterns of the layers that are the head (``"classifier"``, ``["fc.*", "norm"]``); ``None``
            guesses the last linear layer and says so.
        monitor: A value that the module logs, of which mean, deviation, least and greatest value over the clients are
            logged as ``<monitor>/mean`` and so on.
        labels: Gives the class of an item for the partition, where items are not pairs (input, class).
        module_factory: Makes the module once more, such as ``lambda: Net(lr=0.1)``, for a module that
            ``copy.deepcopy`` does not take: what it makes is given the weights.
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
        module,
        made,
        loop=FederatedLoop(cohort),
        head=head,
        monitor=monitor,
        module_factory=module_factory,
        engine=engine,
        seed=seed,
    )
    data = _divided(datamodule, partition, num_clients, labels)
    if is_older(module) or is_older(datamodule):
        as_older(federation)
        as_older(data)
    return federation, data


def _divided(
    datamodule: Any, partition: Partitioner | None, num_clients: int | None, labels: Callable[[Any], Any] | None
) -> FederatedDataModule:
    if isinstance(datamodule, FederatedDataModule):
        if partition is not None or num_clients is not None or labels is not None:
            raise ConfigurationError(
                f"{type(datamodule).__name__} is divided among clients already: leave partition, num_clients and "
                "labels away"
            )
        return datamodule
    if not isinstance(datamodule, LightningDataModule) and not is_older(datamodule):
        raise ConfigurationError(
            f"expected a LightningDataModule, got {type(datamodule).__name__}; put the loaders of the project into one"
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
