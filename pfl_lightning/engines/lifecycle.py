"""Steps that all engines have in common: a fit begins, enters a phase and concludes; a model is to be evaluated."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.data import FederatedData, usual_augmentations
from pfl_lightning.engines.isolation_check import IsolationCheck
from pfl_lightning.errors import ClientCodeError, ClientError, ConfigurationError, FederationError, NonFiniteLossError
from pfl_lightning.fit.data import FitData
from pfl_lightning.fit.public import public_for
from pfl_lightning.fit.tasks import EvaluationTask, FitEnvironment, FitResult, FitTask
from pfl_lightning.functional.tensor_lists import HOST, moved
from pfl_lightning.messages import Broadcast, State
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.seeding import Purpose, derive_seed, torch_seed
from pfl_lightning.state.clients import split_attributes
from pfl_lightning.state.tensors import load_state

SplitMetrics = tuple[EvalMetrics | None, EvalMetrics | None]
"""Metrics of the validation and the test part; ``None`` where there is none."""

Buffers = list[tuple[nn.Module, dict[str, Tensor | None]]]
"""Non-persistent buffers of modules."""

PACKAGE = Path(__file__).resolve().parents[1]


def make_context(
    data: FederatedData,
    client: int,
    round: int,
    model: FederatedClient,
    environment: FitEnvironment,
    *,
    training: bool,
    stored: bool = True,
) -> FitContext:
    """Return the context of a client's local fit, or of an evaluation and what comes before it.

    Args:
        data: Every client's data.
        client: Number of the client.
        round: Number of the round, from 0.
        model: Module of the client's architecture.
        environment: Device and precision.
        training: Whether it is for a local fit, in which unlabeled samples may take part.
        stored: Whether a state of the evaluated client is stored, see :class:`~pfl_lightning.client.FitContext`.
    """
    own = data.client_data(client)
    part = own.train_and_unlabeled if training and model.uses_unlabeled_data else own.train
    batches = getattr(own, "batches", None) or data  # a client may have settings of its own
    fit_data = FitData(
        part,
        batches.batch_size,
        batches.drop_last,
        data.augment,
        model.views,
        batches.eval_batch_size,
        environment.device,
        environment.precision.forward_context,
        environment.precision.convert_input,
        None if part is own.train else own.train,
        own.validation,
    )
    if not training and model.personalization is not None and model.personalization.augment:
        fit_data = fit_data.with_plain_augmentations(usual_augmentations(data))
    public = public_for(model, data, fit_data, environment.seed) if model.public_samples else None
    return FitContext(client, round, fit_data, environment.facts, public=public, stored=stored)


def without_autocast(environment: FitEnvironment) -> AbstractContextManager[object]:
    """Return the context of a local fit or an evaluation, which leaves the outer Trainer's autocast.

    Autocast then holds in the forward passes alone, and no cast of a weight outlives the step that changes the weight.
    """
    return torch.autocast(environment.device.type, enabled=False, cache_enabled=False)


def begin(client: FederatedClient, task: FitTask) -> FitContext:
    """Bring a client to its fit, its personal state under the message of the server; return the fit's context."""
    client.logged_metrics, client.progress_bar_names, client.logged_reductions = {}, frozenset(), {}
    client.loss_scale = b""
    if client.user_module is not None:
        client.user_module.begin_progress(task.resume_state)
    client.train()
    isolation = client.isolation or IsolationCheck.of(client)
    if not isolation.begun:
        isolation.begin(client)
    if client.buffers_change:
        client.restore_buffers()
    personal, broadcast = task.personal, task.broadcast
    if client.device.type != "cpu":
        personal, broadcast = _delivered(client, personal, broadcast)
    load_state(client, personal)
    client.receive(broadcast)
    if client.user_module is not None:
        client.user_module.recall(split_attributes(task.resume_state)[1] if task.resume_state else b"")
    if client.frozen:
        isolation.sample_frozen(client)
    earlier = task.context.round if client.schedule == "rounds" else None  # fits that schedules count
    if client.user_module is None:
        fits, _, client.loss_scale = (task.resume_state or b"").partition(b" ")
        earlier = int(fits or 0) if client.schedule == "continue" else earlier
    return replace(task.context, earlier_fits=earlier)


def _delivered(client: FederatedClient, state: State, message: Broadcast) -> tuple[State, Broadcast]:
    """A client's stored state and a message to it where its model is, which may keep the message's tensors."""
    sent = [tensor for _, _, tensor in message.tensors()]
    arrived = iter(moved([*state.values(), *sent], client.device))
    return dict(zip(state, arrived, strict=False)), message.with_tensors(lambda _: next(arrived))


def failure(error: Exception, client: FederatedClient, context: FitContext, environment: FitEnvironment) -> ClientError:
    """Return what an exception in a local fit costs: the client its round, and the next client nothing.

    The module is brought back to what no next fit does: its device, and the hooks that it began with.

    Raises:
        Exception: The exception itself, where it is not of the client's own code or data: misuse, or a false assertion
            of this package.
    """
    if isinstance(error, ClientError):
        return error
    error.add_note(f"in the local fit of {context.who}, round {context.round + 1}")
    frames = traceback.extract_tb(error.__traceback__)
    of_package = isinstance(error, AssertionError) and Path(frames[-1].filename).resolve().is_relative_to(PACKAGE)
    if isinstance(error, FederationError) or of_package:
        raise error
    client.to(environment.device)
    IsolationCheck.of(client).remove_hooks(client)
    reason = f"its own code or data failed with {type(error).__name__}: {error}"
    return ClientCodeError(context.client, context.round, reason, error, "".join(traceback.format_exception(error)))


def enter_phase(client: FederatedClient, phase: Phase) -> None:
    """Let the phase's parameters train, and nothing else.

    Raises:
        ConfigurationError: The phase has nothing to train; in the first fit of the module: nothing has set something
            that is shared.
    """
    client.phase = phase
    parameters = dict(client.named_parameters())
    isolation = client.isolation or IsolationCheck.of(client)
    if isolation.marked:
        isolation.check_set(client)
    key = ("trained", phase.name, *phase.train, None, *(phase.losses or ()), None, *parameters)
    trained = isolation.matched.get(key)
    if trained is None:
        client.check_phase(phase)
        trained = client.trained_names(phase)
        if not trained:
            raise ConfigurationError(
                f"phase {phase.name!r} of {type(client).__name__} has nothing to train: all that {phase.train} names "
                "is frozen (requires_grad=False); let some of it train, or use a method without this phase"
            )
        isolation.matched[key] = trained
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained)
        parameter.grad = None
    client.train()
    # Frozen means frozen: running statistics of a part that does not train are used, not updated.
    for layer in client.frozen_norms():
        layer.eval()


def conclude(
    client: FederatedClient, context: FitContext, before: Any, losses: Mapping[str, Sequence[float]], start: float
) -> FitResult:
    """Return the result of a trained client's fit: its upload, and its personal state (not copied).

    Args:
        client: The trained client.
        context: The context of its fit.
        before: What its ``before_fit`` returned.
        losses: Means of the loss terms of each phase, by name.
        start: When the fit began, by ``time.perf_counter``.

    The personal state is read after ``make_update``, which may still change it: a method may compute statistics with
    its model, or replace a part of it, before it uploads. Neither is checked here, but once, when the round takes them.

    Raises:
        ConfigurationError: The fit has changed what is frozen, or has added a parameter or buffer.
    """
    isolation = client.isolation or IsolationCheck.of(client)
    if client.frozen:
        isolation.check_frozen(client, context)
    if client.buffers_change:
        client.restore_buffers()
    update = client.make_update(context, before)
    state = client.state_dict()
    kept = isolation.matched.get(("kept", *state))
    if kept is None:
        isolation.check_added(client)
        kept = isolation.matched["kept", *state] = client.kept_names()
    personal = {name: state[name] for name in kept}
    # For the client's next fit: number of fits and loss scale, or what its module hands on.
    if client.user_module is not None:
        resume_state = client.user_module.resume_state
        client.user_module.begin_progress(None)
    else:
        fits = b"%d" % ((context.earlier_fits or 0) + 1) if client.schedule == "continue" else b""
        resume_state = b" ".join((fits, client.loss_scale)).rstrip() or None
    return FitResult(
        context.client,
        context.round,
        update,
        personal,
        {name: sum(values) / len(values) for name, values in losses.items()},
        time.perf_counter() - start,
        logged=dict(client.logged_metrics),
        num_samples=context.data.num_samples,
        resume_state=resume_state,
        progress_bar_names=client.progress_bar_names,
        reductions=client.logged_reductions,
        num_steps=context.num_steps,
        is_cut=context.is_cut,
    )


def phase_data(client: FederatedClient, phase: Phase, context: FitContext) -> FitData:
    """Return the client's data, or the public samples, with the settings of the phase that it has entered.

    In a plain phase, for which no ``drop_last`` can be set, a last batch of a single sample is left out where batch
    normalization trains, which cannot take it; the order being random, it is another sample in every epoch.
    """
    normed = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in client.modules())
    smallest = max(phase.smallest_batch, 2 if phase.plain and normed else 1)
    if phase.source == "public":
        if context.public is None:
            raise ConfigurationError(
                f"phase {phase.name!r} of {type(client).__name__} trains on public samples: set the method's "
                "public_samples to their number in a round"
            )
        smallest = max(phase.smallest_batch, 2 if normed else 1)  # public batches are plain
        return context.public.of_round(context.round).for_phase(phase.batch_size, True, smallest)
    return context.data.for_phase(phase.batch_size, phase.plain, smallest)


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


def means_of(steps: Mapping[str, Sequence[Tensor]]) -> dict[str, float]:
    """Means of the values of all steps, by one wait."""
    means = [torch.stack(list(values)).float().mean() for values in steps.values()]
    return {name: float(mean) for name, mean in zip(steps, moved(means, HOST), strict=True)}


# ---------------------------------------------------------------------- before an evaluation


def load_own_state(client: FederatedClient, task: EvaluationTask, environment: FitEnvironment) -> None:
    """Put the model that a client is evaluated with into the module of its architecture, before any fine-tuning.

    It is the client's personal state under what the server would send now; or, for a method that evaluates the trained
    models, the client's model after its last local fit. Then comes the method's own ``before_evaluation``.
    """
    prepares = type(client).before_evaluation is not FederatedClient.before_evaluation
    if prepares:  # nothing of a broadcast, such as a bank of models, is to outlast the evaluation
        forget_preparation(client)  # of the client before
        IsolationCheck.of(client).buffers = temporary_buffers(client)
    if client.buffers_change:
        client.restore_buffers()
    stored, broadcast = task.stored, task.broadcast
    if client.device.type != "cpu":
        stored, broadcast = _delivered(client, stored, broadcast)
    if not task.trained:
        load_state(client, stored)
    client.receive(broadcast)
    if client.user_module is not None:
        client.user_module.recall(task.attributes)
    if task.trained:
        load_state(client, stored)  # over the received weights; what else was received stays
    if prepares:
        _prepare(client, task.context, environment)


def _prepare(client: FederatedClient, context: FitContext, environment: FitEnvironment) -> None:
    """Call the client's ``before_evaluation`` on the model that the module holds, in evaluation mode.

    Draws of torch's, Python's and NumPy's own generators derive from (seed, round, client), and are the same in every
    evaluation of a round.

    Raises:
        ConfigurationError: It wrote into a non-persistent buffer, which may be a broadcast's tensor.
    """
    held = [item for _, own in temporary_buffers(client) for item in own.items()]
    versions = [(name, tensor, tensor._version) for name, tensor in held if tensor is not None]
    client.eval()
    seed = derive_seed(environment.seed, Purpose.EVALUATION_MODEL, context.round, context.client)
    try:
        with torch.no_grad(), without_autocast(environment), torch_seed(seed, python=True):
            client.before_evaluation(context)
    except Exception as error:
        error.add_note(f"before the evaluation of {context.who}, round {context.round + 1}")
        raise
    client.eval()
    for name, tensor, version in versions:
        if tensor._version != version:
            raise ConfigurationError(
                f"{type(client).__name__}.before_evaluation writes into the buffer {name!r}, which would outlast the "
                "evaluation: replace it by assign of a TensorDict, or by setting the attribute to a new tensor"
            )


def forget_preparation(client: FederatedClient) -> None:
    """Give the module back the buffers that it had; parameters and values are loaded before they are next used."""
    if client.buffers_change:
        client.restore_buffers()
    isolation = IsolationCheck.of(client)
    before, isolation.buffers = isolation.buffers, []
    give_back(before)


def give_back(buffers: Buffers) -> None:
    """Give modules back the non-persistent buffers that they had."""
    for module, own in buffers:
        for key in list(module._non_persistent_buffers_set):
            delattr(module, key)
        for key, tensor in own.items():
            module.register_buffer(key, tensor, persistent=False)


def temporary_buffers(client: FederatedClient) -> Buffers:
    """The non-persistent buffers of each module."""
    return [
        (module, {key: tensor for key, tensor in module._buffers.items() if key in module._non_persistent_buffers_set})
        for module in client.modules()
    ]
