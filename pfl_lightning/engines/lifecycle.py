"""Steps of a local fit that all engines have in common: begin, enter a phase, conclude."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.data import FederatedData, FitData
from pfl_lightning.engines.tasks import FitEnvironment, FitTask, Losses
from pfl_lightning.errors import ClientError, ConfigurationError, NonFiniteLossError
from pfl_lightning.messages import ClientUpdate, State
from pfl_lightning.state.tensors import load_state

__all__ = [
    "begin",
    "check_finite_losses",
    "conclude",
    "enter_phase",
    "explained",
    "local_fit",
    "make_context",
    "means",
    "needs_no_trainer",
    "phase_data",
    "trains",
]

# Matching the patterns of a method takes longer than a step of a small model, and their names do not change.
_names: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Iterable[str]]] = WeakKeyDictionary()


def make_context(
    data: FederatedData, client: int, round: int, model: FederatedClient, environment: FitEnvironment, *, training: bool
) -> FitContext:
    """Return the context of a client's local fit, or of an evaluation and what comes before it.

    Args:
        data: Every client's data.
        client: Number of the client.
        round: Number of the round, from 0.
        model: Module of the client's architecture.
        environment: Device and precision.
        training: Whether it is for a local fit, in which unlabeled samples may take part.
    """
    own = data.client_data(client)
    part = own.train_and_unlabeled if training and model.uses_unlabeled_data else own.train
    fit_data = FitData(
        part,
        data.batch_size,
        data.drop_last,
        data.augment,
        model.views,
        data.eval_batch_size,
        environment.device,
        environment.precision.forward_context,
        environment.precision.convert_input,
        None if part is own.train else own.train,
    )
    return FitContext(client, round, fit_data, environment.facts)


def local_fit(environment: FitEnvironment) -> AbstractContextManager[object]:
    """Return the context of a local fit, which leaves the outer Trainer's autocast.

    Autocast then holds in the forward passes alone, and no cast of a weight outlives the step that changes the weight.
    """
    return torch.autocast(environment.device.type, enabled=False, cache_enabled=False)


def begin(client: FederatedClient, task: FitTask) -> None:
    """Bring a client to the start of its fit: its personal state, under the message of the server."""
    client.train()
    load_state(client, task.personal)
    client.receive(task.broadcast)


def enter_phase(client: FederatedClient, phase: Phase) -> None:
    """Let the phase's parameters train, and nothing else."""
    client.check_phase(phase)
    client.phase = phase
    parameters = dict(client.named_parameters())
    known = _names.setdefault(client, {})
    key = ("trained", phase.name, *phase.train, *parameters)
    if key not in known:
        known[key] = client.trained_names(phase)
    trained = known[key]
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained)
        parameter.grad = None
    client.train()
    # Frozen means frozen: running statistics of a part that does not train are used, not updated.
    for layer in client.frozen_norms():
        layer.eval()


def conclude(client: FederatedClient, context: FitContext, before: Any) -> tuple[ClientUpdate, State]:
    """Return the upload of a trained client, and its personal state (not copied).

    The personal state is read after ``make_update``, which may still change it: a method may compute statistics with
    its model, or replace a part of it, before it uploads. The update is not checked here but by the server, once. The
    personal state, which the server never sees, is.

    Raises:
        ClientError: The personal state is not finite.
    """
    update = client.make_update(context, before)
    state = client.state_dict()
    known = _names.setdefault(client, {})
    key = ("kept", *state)
    if key not in known:
        known[key] = client.kept_names()
    personal = {name: state[name] for name in known[key]}
    for name, tensor in personal.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ClientError(
                context.client,
                context.round,
                f"{name} is not finite after the local fit; lower the learning rate, clip the gradient, "
                "or look at this client's data",
            )
    return update, personal


def phase_data(client: FederatedClient, phase: Phase, context: FitContext) -> FitData:
    """Return the client's data with the settings of the phase that it has entered.

    In a plain phase, for which no ``drop_last`` can be set, a last batch of a single sample is left out where batch
    normalization trains, which cannot take it; the order being random, it is another sample in every epoch.
    """
    normed = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in client.modules())
    return context.data.for_phase(phase.batch_size, phase.plain, leave_out_single=phase.plain and normed)


def explained(error: Exception, client: FederatedClient, phase: Phase, context: FitContext) -> Exception:
    """Return the error with the advice that it needs, or as it is.

    Batch normalization cannot train on a batch of one sample, and a module may ask for a Trainer that is not there.
    """
    if _misses_trainer(error):
        return _no_trainer(client.step_module)
    if not str(error).startswith("Expected more than 1 value per channel"):
        return error
    count, size = context.data.num_samples, context.data.batch_size
    if phase.plain and count == 1:
        return ClientError(
            context.client,
            context.round,
            f"batch normalization cannot train in phase {phase.name!r} on the client's only training sample; give "
            "it more samples, or train the head alone",
        )
    advice = "choose another batch_size" if phase.plain else "set drop_last to true, or choose another batch_size"
    return ConfigurationError(
        f"client {context.client}, round {context.round}: batch normalization cannot train on a batch of one "
        f"sample, and the {count} training samples in batches of {size} leave such a batch; {advice}"
    )


@contextmanager
def needs_no_trainer(module: nn.Module) -> Iterator[None]:
    """Explain what to do when a module asks for a Trainer that is not there."""
    try:
        yield
    except RuntimeError as error:
        if not _misses_trainer(error):
            raise
        raise _no_trainer(module) from error


def _misses_trainer(error: Exception) -> bool:
    return "not attached to a `Trainer`" in str(error)


def _no_trainer(module: nn.Module) -> ConfigurationError:
    return ConfigurationError(
        f"{type(module).__name__} uses self.trainer (or self.optimizers(), self.lr_schedulers() or the like), and "
        "SequentialEngine has no Trainer: use TrainerEngine"
    )


def trains(module: nn.Module) -> bool:
    """Return whether any parameter trains in the current phase."""
    return any(parameter.requires_grad for parameter in module.parameters())


def check_finite_losses(losses: Sequence[Tensor], context: FitContext, phase: Phase) -> None:
    """Refuse NaN and infinity in the losses of a phase's steps so far.

    Raises:
        NonFiniteLossError: Names the client, the round, the phase and the first such step.
    """
    if not losses:
        return
    finite = torch.isfinite(torch.stack(list(losses)))
    if not bool(finite.all()):
        step = int((~finite).nonzero()[0])
        raise NonFiniteLossError(
            context.client,
            context.round,
            f"the loss is {float(losses[step])} at step {step} of phase {phase.name!r}; "
            "lower the learning rate, clip the gradient, or look at this client's data",
        )


def means(steps: Mapping[str, Sequence[Tensor]]) -> Losses:
    """Return means over the steps, by name."""
    return {name: float(torch.stack(list(values)).float().mean()) for name, values in steps.items()}
