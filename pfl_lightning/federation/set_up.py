"""What a federation is made of, and what is refused before the first round."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from inspect import isclass
from typing import TYPE_CHECKING, Any, cast

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.nn.modules.batchnorm import BatchNorm1d, _BatchNorm

from pfl_lightning.class_metrics import find_metrics
from pfl_lightning.client import FederatedClient, Phase
from pfl_lightning.data import FederatedData, names_of
from pfl_lightning.encoders.assignment import unwrapped
from pfl_lightning.engines.advice import SINGLE_ITEM
from pfl_lightning.engines.lifecycle import enter_phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.loop import RoundLoop
from pfl_lightning.federation.outer_callbacks import check_strategy, end_by_rounds, refuse_callback
from pfl_lightning.federation.preemption import Preemption
from pfl_lightning.federation.saved_state import fingerprints
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.fit.public import check_public
from pfl_lightning.lightning_private import has_trainer
from pfl_lightning.names import method_named
from pfl_lightning.notices import forget_shown, named_clients
from pfl_lightning.privacy.mechanism import PrivacyMechanism
from pfl_lightning.seeding import Purpose, derive_seed, torch_seed
from pfl_lightning.server import Aggregator
from pfl_lightning.state.architectures import MethodFactory
from pfl_lightning.state.checkpoints import use_atomic_files
from pfl_lightning.state.client_states import spill_to_disk
from pfl_lightning.state.clients import Clients, ResumeStates
from pfl_lightning.state.closures import copy_module

if TYPE_CHECKING:
    from pfl_lightning.federation.federation import Federation


def checked_method(given: Any) -> MethodFactory:
    """What makes the clients.

    Raises:
        ConfigurationError: It makes none; says what to give.
    """
    method: Any = method_named(given) if isinstance(given, str) else given
    made, _ = unwrapped(method)
    is_client = not isclass(made) or issubclass(made, FederatedClient)
    if isinstance(made, nn.Module) or not callable(made) or not is_client:
        raise ConfigurationError(
            "method must be a class of pfl_lightning.methods, a partial of one with its "
            f"hyper-parameters, or its name; got {given if isclass(given) else type(given).__name__}"
        )
    return cast(MethodFactory, method)


def begin(federation: Federation, stage: str) -> None:
    """Make what a fit, a validation or a test needs and is not there yet.

    Raises:
        ConfigurationError: Other clients than before, or batches of one item that the clients cannot train on.
    """
    forget_shown()
    check_strategy(federation.trainer)
    use_atomic_files(federation.trainer)
    data = federation.data
    federation.client_names = names_of(data)
    if not federation.is_set_up:
        federation._build(data)
    elif federation.num_clients != data.num_clients:
        raise ConfigurationError(
            f"this federation has {federation.num_clients} clients, the data have {data.num_clients}"
        )
    if stage == "fit":
        federation.fingerprints = fingerprints(data)
        check_single_items(federation.clients, data)


def build(federation: Federation, data: FederatedData) -> None:
    """Give a federation its clients' modules, its server and the clients' states.

    Raises:
        ConfigurationError: The method's server is none, or the data lack what the method needs.
    """
    assignment = federation._assignment
    groups, models = assignment.assign(data.num_clients), federation.build_models(data)
    if models[0].views > 1 and not data.augment and models[0].step_module is models[0]:
        warnings.warn(
            f"{type(models[0]).__name__} compares {models[0].views} augmented views of each sample, and the data "
            "module augments nothing (augment=False): the views are equal",
            stacklevel=2,
        )
    federation.class_metrics = find_metrics(federation.metrics, models[0].num_classes)
    if federation.metrics and (models[0].user_module is not None or models[0].uses_knn_evaluation()):
        why = (
            "is evaluated by nearest neighbors"
            if models[0].user_module is None
            else "logs the metrics of its own steps"
        )
        name = type(models[0] if models[0].user_module is None else models[0].step_module).__name__
        warnings.warn(f"metrics: {name} {why}, so there are no further metrics", stacklevel=2)
    check_public(models[0], data)
    # Lightning would convert later, when the server and the personal states have taken their dtype already. (A
    # checkpoint is loaded before that, too.)
    convert = federation.trainer.precision_plugin.convert_module
    converted = [cast(FederatedClient, convert(model)) for model in models]
    federation.models.extend(converted)
    with torch_seed(derive_seed(federation.seed, Purpose.SERVER)):
        server = converted[0].configure_aggregator(data.num_clients)
    federation.clients = Clients(converted, assignment.labels, groups)  # whose state may depend on their number
    if not isinstance(server, Aggregator):
        raise ConfigurationError(
            f"{type(converted[0]).__name__}.configure_aggregator returned {type(server).__name__}, expected an "
            "Aggregator: return the method's server, such as AveragingAggregator(self, num_clients)"
        )
    if federation.server_optimizer is not None:
        server.use_optimizer(converted[0], federation.server_optimizer)
    if federation.robust is not None:
        federation.robust.check_server(server, type(converted[0]).__name__)
    federation.server = cast(Aggregator, convert(server))
    if federation.privacy is not None:
        participating = len(data.participating)
        federation.mechanism = PrivacyMechanism(federation.privacy, server, converted[0], participating)
    federation.server.seed = federation.seed
    limit, stores = federation.client_state_memory_gb, federation.personal.stores
    spill_to_disk(limit, [*stores, *federation.server.client_states()], federation.spill_dir)
    scales = federation.trainer.precision_plugin.precision == "16-mixed"
    if any(model.hands_on or (scales and model.user_module is None) for model in converted):
        rest = None if limit is None else limit - sum(store.most_bytes for store in stores) / 1e9
        federation.clients.resume_states = ResumeStates(data.num_clients, rest, federation.spill_dir)
    federation.fingerprints = fingerprints(data)


def no_data(federation: Federation) -> ConfigurationError:
    """The error of a federation that is asked for its data, and has no Trainer, or one of other data."""
    if not has_trainer(federation):
        return ConfigurationError(
            "this federation has no Trainer, and so no clients' data (a copy, or one that was read from a file, "
            "has none): use the one that was fitted, or pass this one to a Trainer"
        )
    return ConfigurationError(
        "a Federation needs a FederatedDataModule, trainer.fit(federation, datamodule=...); got "
        f"{type(getattr(federation.trainer, 'datamodule', None)).__name__}. FromLightning and FromDatasets wrap others"
    )


def check_clients(clients: Clients, data: FederatedData, facts: RunFacts) -> None:
    """Refuse clients that lack what the method needs before the first round, not when their turn comes.

    Raises:
        ConfigurationError: Names what is missing, and whose.
    """
    for model in clients.models:
        model.check_phases()
        model.check_run(facts)
        for client in data.participating if model.needs_validation else ():
            if not len(data.client_data(client).validation):
                who = named_clients([client], names_of(data))
                raise ConfigurationError(
                    f"{type(model).__name__} needs validation samples of every client, and {who} has none: "
                    "set the data module's validation_share"
                )
    if any(type(model).check_samples is not FederatedClient.check_samples for model in clients.models):
        groups: dict[int, dict[int, int]] = {}
        for client in data.participating:
            own, model = data.client_data(client), clients.model_of(client)
            part = own.train_and_unlabeled if model.uses_unlabeled_data else own.train
            groups.setdefault(clients.architecture_of[client], {})[client] = len(part)
        for index, samples in groups.items():
            clients.models[index].check_samples(samples)


def check_single_items(clients: Clients, data: FederatedData) -> None:
    """Refuse clients with a training batch of one item where batch normalization needs two, before the first round.

    It needs two where an item gives one value for each channel. Left to the fits are loaders whose batches only they
    know, and modules that do not run on a batch's inputs alone.

    Raises:
        ConfigurationError: Names the clients and what helps.
    """
    for number, model in enumerate(clients.models):
        if model.views > 1 or not any(isinstance(layer, _BatchNorm) for layer in model.modules()):
            continue
        own = [client for client in data.participating if clients.architecture_of[client] == number]
        for phase in model.phases():
            sizes = {client: _single(model, data, client, phase) for client in own}
            found = {client: size for client, size in sizes.items() if size is not None}
            if found and _needs_two(model, phase, data, next(iter(found))):
                client, (count, size) = next(iter(found.items()))
                all_of_them, first = (named_clients(own, names_of(data)) for own in (list(found), [client]))
                raise ConfigurationError(
                    f"{all_of_them}: batch normalization cannot train on a batch of one item in phase {phase.name!r}, "
                    f"and {first} has {count} training item{'s' * (count > 1)} in batches of {size}; {SINGLE_ITEM}"
                )


def _single(model: FederatedClient, data: FederatedData, client: int, phase: Phase) -> tuple[int, int] | None:
    """A client's number of items and batch size, where a batch of the phase has one item; else ``None``."""
    own: Any = data.client_data(client)
    part = own.train_and_unlabeled if model.uses_unlabeled_data and not phase.plain else own.train
    source, settings = getattr(part, "source", None), getattr(own, "batches", None) or data
    known = hasattr(part, "indices")
    if source is not None:  # its items are read by their places, in batches of the size that is given, or nobody knows
        known = source.order is None and source.loader is None and source.by == "items"
    if not known or phase.source == "public" or not phase.epochs:
        return None
    count, size = len(part), phase.batch_size or settings.batch_size
    dropped = phase.plain or settings.drop_last or phase.smallest_batch > 1
    single = size == 1 or (count % size == 1 and ((count == 1 and not phase.plain) or (count > size and not dropped)))
    return (count, size) if single else None


@torch.no_grad()
def _needs_two(model: FederatedClient, phase: Phase, data: FederatedData, client: int) -> bool:
    """Whether a layer that trains in the phase refuses one item: the encoder on it, or one behind, of features."""
    tried = copy_module(model)
    tried.train()
    enter_phase(tried, phase)
    inside = {id(layer) for layer in tried.encoder.modules()}
    behind = [layer for layer in tried.modules() if isinstance(layer, BatchNorm1d) and id(layer) not in inside]
    try:
        with isolate_rng():
            batch: Any = next(iter(data.client_data(client).train.loader(1)))
            tried.encoder(batch[0] if isinstance(batch, tuple | list) else batch)
    except Exception as error:  # of a network that takes something else than the inputs: the fit tells
        if str(error).startswith("Expected more than 1 value per channel"):
            return True
    return tried.step_module is tried and any(layer.training for layer in behind)


def missing_callbacks(
    trainer: Any, make_loop: Callable[[], L.Callback], extra: Sequence[L.Callback] = ()
) -> list[L.Callback]:
    """The loop that a fit lacks, and on SLURM what waits for its signals; nothing for an evaluation.

    Args:
        trainer: The outer Trainer.
        make_loop: Makes the loop.
        extra: Callbacks that the Trainer gets beside those that it has.
    """
    callbacks = [*trainer.callbacks, *extra]
    for callback in callbacks:
        refuse_callback(callback, "Federation", "Federation")
    if trainer.state.fn != TrainerFn.FITTING:
        return []
    end_by_rounds(callbacks)
    missing = [] if any(isinstance(callback, RoundLoop) for callback in callbacks) else [make_loop()]
    return [*missing, Preemption()] if Preemption.is_needed(trainer) else missing
