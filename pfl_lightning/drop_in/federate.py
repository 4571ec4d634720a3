"""One call that makes a federation of a Lightning project."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import lightning as L
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from pfl_lightning.client import FederatedClient
from pfl_lightning.datamodules import FederatedDataModule, Partitioner
from pfl_lightning.drop_in.client.copies import Factory
from pfl_lightning.drop_in.client.parts import ClientParts
from pfl_lightning.drop_in.fits.over_rounds import Continuity
from pfl_lightning.drop_in.forms.checks import check_labels, check_method, check_module, split_method
from pfl_lightning.drop_in.forms.given_data import GIVEN, data_of
from pfl_lightning.drop_in.outer.federation import ModuleFederation
from pfl_lightning.engines import Engine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.loop import RoundLoop
from pfl_lightning.learner import MakeOptimizer
from pfl_lightning.names import did_you_mean, method_named, parameters_of
from pfl_lightning.older_package import as_older, is_older
from pfl_lightning.privacy import ClientPrivacy
from pfl_lightning.robust import Robust

Method = type[FederatedClient] | partial[FederatedClient]


def federate(
    module: L.LightningModule,
    datamodule: LightningDataModule | DataLoader[Any] | Sequence[Any] | None = None,
    method: Method | str | None = None,
    partition: Partitioner | None = None,
    *,
    num_clients: int | None = None,
    head: str | Sequence[str] | None = None,
    features: str | None = None,
    monitor: str | None = None,
    labels: Callable[[Any], Any] | None = None,
    module_factory: Factory | None = None,
    frozen: Sequence[str] | None = None,
    personal: str | Sequence[str] = (),
    shared: str | Sequence[str] = (),
    cohort: int | float = 1.0,
    local_callbacks: Sequence[L.Callback] = (),
    engine: Engine | None = None,
    schedule: str = "continue",
    optimizer_state: str = "reset",
    seed: int | None = None,
    server_optimizer: MakeOptimizer | None = None,
    privacy: ClientPrivacy | None = None,
    robust: Robust | None = None,
    shared_evaluation: bool = False,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    test_dataloaders: Any = None,
    **hyperparameters: Any,
) -> tuple[ModuleFederation, FederatedDataModule]:
    """Make a federation of a Lightning project without changes to its classes.

    The two that come back take the places of the two that went in: ``trainer.fit(module, datamodule=data)`` trains the
    federation, ``max_epochs`` is its number of rounds, and callbacks and loggers see one epoch a round.

    Example:
        >>> module, data = federate(Net(), Data(), FedPer, num_clients=10)  # doctest: +SKIP
        >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
        >>> module, data = federate(Net(), [hospital, practice, office], FedPer)  # doctest: +SKIP

    Args:
        module: The LightningModule. Clients train copies; when a fit is over it holds the global model. Where it is
            of the package pytorch_lightning, Trainers of either package fit the federation.
        datamodule: The LightningDataModule, or training loader, whose Datasets are divided; a list of
            LightningDataModules, DataLoaders or Datasets, one a client; or a FederatedDataModule as it is. ``None``
            takes the loaders that the module brings itself.
        method: A class of :mod:`pfl_lightning.methods` that needs no more of a model than its training step, or the
            features in front of a head, a partial of one, or its name.
        partition: The rule that says which client holds which items; ``None`` is IID over ``num_clients``.
        num_clients: Number of clients m, where no rule is given.
        head: Names or patterns of the layers that are the head (``"classifier"``, ``["fc.*", "norm"]``); ``None``
            finds it by tracing a batch where the method needs one, says so, and refuses to guess.
        features: Name of the layer whose output are the features, for methods that work on features (FedProto, FedPAC,
            ...); ``None`` for the input of the head.
        monitor: A value that the module logs, of which mean, deviation, least and greatest value over the clients are
            logged as ``<monitor>/mean`` and so on.
        labels: Gives the class of an item for the partition, and the classes (N,) of a batch for methods on features,
            where these are not pairs (input, class): ``lambda item: item["topic"]`` does both.
        module_factory: Makes the module once more, such as ``lambda: Net(lr=0.1)``, for a module that
            ``copy.deepcopy`` does not take: what it makes is given the weights.
        frozen: Names or patterns of parameters with ``requires_grad=False`` that no local fit changes. They neither
            travel nor are stored for each client, and copies share their memory. ``None`` is all of them but those of a
            network that may be a moving average of another; ``()`` is none: they travel as what trains does.
        personal: Names or patterns of layers, parameters or buffers that stay with each client, whatever the method
            shares: ``("queue*",)`` for a queue of keys, which has no mean. They are stored, saved and exported with the
            client's state. A method that has a parameter ``personal`` of its own (DualFed) is given it.
        shared: Names or patterns of what travels and is averaged, whatever the method keeps on the client.
        cohort: How many clients take part in a round; for more, give the Trainer a FederatedLoop of your own.
        local_callbacks: Callbacks that run inside local fits and evaluations, on the batches of each client; each local
            fit has new copies of them.
        engine: How local fits run; ``None`` is :class:`~pfl_lightning.TrainerEngine`.
        schedule: ``"continue"`` (default): a client's schedulers, plain attributes of the module, ``current_epoch`` and
            ``global_step`` go on over the rounds that it takes part in, and ``self.trainer.max_epochs`` and
            ``estimated_stepping_batches`` are those of all rounds together; ``"restart"``: every local fit
            begins at epoch 0.
        optimizer_state: ``"reset"`` (default): every local fit begins without momenta and the like of its optimizers;
            ``"keep"``: they stay with the client.
        seed: Seed of everything random; ``None`` takes what ``seed_everything`` set.
        server_optimizer: Makes the optimizer of the server; see :class:`~pfl_lightning.Federation`.
        privacy: Client-level differential privacy; see :class:`~pfl_lightning.Federation`.
        robust: Rule against lying clients; see :class:`~pfl_lightning.Federation`.
        shared_evaluation: Whether every client is evaluated on all items of the validation and test loaders, in their
            order, not on a part of its own: for steps that need the whole of a set (a retrieval, a leaderboard).
        train_dataloaders: In the place of ``datamodule``: the training loader whose Dataset is divided, a dictionary or
            a CombinedLoader of several, or a list of loaders, one a client.
        val_dataloaders: The validation loader, a list of several, or one a client.
        test_dataloaders: The test loader, a list of several, or one a client.
        hyperparameters: Of the method, such as ``epochs`` (local epochs a round, 1 by default) and ``mu``.

    Returns:
        The federation and its data.

    Raises:
        ConfigurationError: Says what of the project, or of the arguments, cannot be federated, and what to do.
    """
    check_labels(labels)
    method = method_named(method) if isinstance(method, str) else method
    check_options(method, hyperparameters)
    client, settings = split_method(partial(cast(Method, method), **hyperparameters))
    module = check_module(module)
    check_method(client, settings)
    if personal and "personal" in inspect.signature(client.__init__).parameters:
        settings, personal = {**settings, "personal": personal}, ()
    federation = ModuleFederation(
        module,
        ClientParts(client, settings, head, features, labels, module_factory, frozen, personal, shared),
        loop=RoundLoop(cohort),
        monitor=monitor,
        local_callbacks=local_callbacks,
        engine=engine,
        continuity=Continuity(schedule, optimizer_state),
        seed=seed,
        server_optimizer=server_optimizer,
        privacy=privacy,
        robust=robust,
    )
    loaders = dict(zip(GIVEN, (train_dataloaders, val_dataloaders, test_dataloaders), strict=True))
    reads_classes = federation.reads_classes
    if isinstance(datamodule, FederatedDataModule | list | tuple) and reads_classes:
        labels = None  # of batches
    division: dict[str, Any] = {"partition": partition, "num_clients": num_clients, "labels": labels}
    data = data_of(
        datamodule, loaders, module, **division, shared_evaluation=shared_evaluation, evaluates=reads_classes
    )
    given = datamodule if isinstance(datamodule, list | tuple) else [datamodule]
    if any(map(is_older, (module, *given))):
        as_older(federation)
        as_older(data)
    return federation, data


def check_options(method: Any, options: Iterable[str]) -> None:
    """Refuse names that are no option of :func:`federate` and no hyper-parameter of a method.

    Raises:
        ConfigurationError: Names one of them, and what may be meant; or there is no such method.
    """
    client, settings = split_method(method)
    known = inspect.signature(federate).parameters.keys() - {"module", "method", "cohort", "hyperparameters"}
    own = set(parameters_of(client))
    for name, names in (*((name, own) for name in settings), *((name, own | known) for name in options)):
        if name not in names:
            meant = did_you_mean(name, sorted(names)) or f", which has {', '.join(sorted(names))}"
            raise ConfigurationError(f"{client.__name__} has no option {name!r}{meant}")
