"""What every engine has in common: a task in, a result out, phases in between."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.data import FederatedData, FitData, SplitSource
from pfl_lightning.drop_in.client import ModuleClient
from pfl_lightning.drop_in.module_evaluation import StepsTask, run_steps, score_module
from pfl_lightning.engines.evaluation import SplitMetrics, load_own_state, score_parts
from pfl_lightning.engines.tasks import (
    EvaluationResult,
    EvaluationTask,
    FitEnvironment,
    FitResult,
    FitTask,
    Losses,
)
from pfl_lightning.errors import ClientError, ConfigurationError, NonFiniteLossError
from pfl_lightning.messages import ClientUpdate, State
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.seeding import Purpose, derive_seed, phase_purpose, torch_seed
from pfl_lightning.state.tensors import load_state, select_state

__all__ = ["Engine"]


class Engine(ABC):
    """Trains clients: base of the engines.

    Args:
        gradient_clip_val: Clip gradients at this value; ``None`` does not clip. (The outer Trainer has no gradients, so
            that its own option of this name does not apply.)
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
    """

    clients_per_batch: int = 1
    """How many clients are taken at once."""

    def __init__(self, gradient_clip_val: float | None = None, gradient_clip_algorithm: str = "norm") -> None:
        if gradient_clip_algorithm not in ("norm", "value"):
            raise ValueError(f"gradient_clip_algorithm must be 'norm' or 'value', got {gradient_clip_algorithm!r}")
        if gradient_clip_val is not None and gradient_clip_val <= 0:
            raise ValueError(f"gradient_clip_val must be positive or null, got {gradient_clip_val}")
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm

    def start(  # noqa: B027
        self, models: Sequence[FederatedClient], data: FederatedData, environment: FitEnvironment
    ) -> None:
        """Called before the first task of a fit, a validation or a test, for engines that hold more than themselves.

        Args:
            models: The module of each architecture.
            data: Every client's data.
            environment: What the outer Trainer gives.
        """

    def stop(self) -> None:  # noqa: B027
        """Let go of what :meth:`start` took; called when the fit, the validation or the test is over or has failed."""

    def run(self, tasks: Iterable[tuple[FederatedClient, FitTask]], environment: FitEnvironment) -> Iterator[FitResult]:
        """Run the local fits of a round, each with the module of its architecture.

        Tasks are taken, and results yielded, one by one and in the same order, so that neither broadcasts nor updates
        of a whole cohort need be held. A result's personal state is valid until the next result is asked for.
        """
        waiting = iter(tasks)
        while group := list(islice(waiting, self.clients_per_batch)):
            models = {id(model): model for model, _ in group}
            if len(models) == 1:
                yield from self.fit(group[0][0], [task for _, task in group], environment)
                continue
            found: dict[int, FitResult] = {}
            for model in models.values():
                for result in self.fit(model, [task for own, task in group if own is model], environment):
                    found[result.client] = with_own_state(result)
            yield from (found[task.client] for _, task in group)

    def evaluate(
        self, tasks: Iterable[tuple[FederatedClient, EvaluationTask]], environment: FitEnvironment
    ) -> Iterator[EvaluationResult]:
        """Judge clients by their own models, fine-tuned where their method does so; results in the tasks' order."""
        for client, task in tasks:
            error = self.load_own_model(client, task, environment)
            yield EvaluationResult(task.client, *self.score(client, task, environment), error)

    def score(self, client: FederatedClient, task: EvaluationTask, environment: FitEnvironment) -> SplitMetrics:
        """Scores of the model that the module holds, in evaluation mode, on the parts that are asked for."""
        if isinstance(client, ModuleClient):
            return self._score_module(client, task, environment)
        return score_parts(client, task, environment)

    def _score_module(self, client: ModuleClient, task: EvaluationTask, environment: FitEnvironment) -> SplitMetrics:
        def score(part: SplitSource | None, stage: str) -> EvalMetrics | None:
            if part is None or not len(part):
                return None
            return score_module(client, part, stage, task.data, environment, self.run_module_steps)

        return score(task.validation, "validation"), score(task.test, "test")

    def run_module_steps(self, task: StepsTask) -> dict[str, float]:
        """Run the validation or test steps of somebody's own module; what it logged."""
        return run_steps(task)

    def load_own_model(
        self, client: FederatedClient, task: EvaluationTask, environment: FitEnvironment
    ) -> ClientError | None:
        """Bring the module to a client's own model, fine-tuned, in evaluation mode.

        Returns:
            Why it was not fine-tuned, if that failed.
        """
        load_own_state(client, task)
        error = None
        if client.personalization_phases():
            context = FitContext(task.client, task.round, task.data)
            try:
                with torch.enable_grad():
                    self.personalize(client, context, environment)
            except ClientError as found:
                error = found
                load_own_state(client, task)
        client.eval()
        return error

    @abstractmethod
    def run_phase(
        self, client: FederatedClient, phase: Phase, context: FitContext, environment: FitEnvironment, purpose: str
    ) -> Losses:
        """Train ``client`` in place through one phase.

        Batch orders and augmentations are drawn from a generator seeded by (seed, round, client, ``purpose``).

        Raises:
            NonFiniteLossError: The loss became NaN or infinite.
        """

    def fit(
        self, client: FederatedClient, tasks: Sequence[FitTask], environment: FitEnvironment
    ) -> Iterator[FitResult]:
        """Run tasks and yield their results in order.

        Args:
            client: The module that all tasks train in turn; afterwards it holds the state of the last one.
            tasks: Clients to train.
            environment: What the outer Trainer gives.
        """
        for task in tasks:
            yield self._fit_one(client, task, environment)

    def personalize(self, client: FederatedClient, context: FitContext, environment: FitEnvironment) -> None:
        """Run the client's personalization phases in place, on the state that it holds."""
        client.train()
        seed = derive_seed(environment.seed, Purpose.PERSONALIZE_MODEL, context.round, context.client)
        with environment.fit_context(), torch_seed(seed):
            for index, phase in enumerate(client.personalization_phases()):
                self._run_prepared(client, phase, context, environment, phase_purpose(Purpose.PERSONALIZE, index))

    def _fit_one(self, client: FederatedClient, task: FitTask, environment: FitEnvironment) -> FitResult:
        start = time.perf_counter()
        context = FitContext(task.client, task.round, task.data)
        losses: dict[str, list[float]] = {}
        client.pop_logged_metrics()  # what a failed fit left
        try:
            begin(client, task)
            seed = derive_seed(environment.seed, Purpose.FIT_MODEL, task.round, task.client)
            with environment.fit_context(), torch_seed(seed):
                before = client.before_fit(context)
                for index, phase in enumerate(client.phases()):
                    found = self._run_prepared(client, phase, context, environment, phase_purpose(Purpose.FIT, index))
                    for name, value in found.items():
                        losses.setdefault(name, []).append(value)
                update, personal = conclude(client, context, before)
        except ClientError as error:
            seconds = time.perf_counter() - start
            return FitResult(task.client, task.round, None, {}, {}, seconds, error)
        except Exception as error:
            error.add_note(f"in the local fit of client {task.client}, round {task.round}")
            raise
        means = {name: sum(values) / len(values) for name, values in losses.items()}
        seconds = time.perf_counter() - start
        logged, samples = client.pop_logged_metrics(), context.data.num_samples
        return FitResult(task.client, task.round, update, personal, means, seconds, logged=logged, num_samples=samples)

    def _run_prepared(
        self, client: FederatedClient, phase: Phase, context: FitContext, environment: FitEnvironment, purpose: str
    ) -> Losses:
        enter_phase(client, phase)
        context = replace(context, data=phase_data(client, phase, context))
        with _explained(context, phase):
            losses = self.run_phase(client, phase, context, environment, purpose)
        if trains(client.encoder):
            context.data.forget_features()
        return losses


def with_own_state(result: FitResult) -> FitResult:
    """The result with a personal state of its own."""
    return replace(result, personal={name: value.clone() for name, value in result.personal.items()})


def begin(client: FederatedClient, task: FitTask) -> None:
    """Bring a client to where its fit starts: its personal state, under what the server sent."""
    client.train()
    load_state(client, task.personal)
    client.receive(task.broadcast)


def enter_phase(client: FederatedClient, phase: Phase) -> None:
    """Let the phase's parameters train, and nothing else."""
    client.check_phase(phase)
    client.phase = phase
    parameters = dict(client.named_parameters())
    trained = client.trained_names(phase)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained)
        parameter.grad = None
    client.train()
    _hold_statistics_of_frozen_parts(client)


def conclude(client: FederatedClient, context: FitContext, before: Any) -> tuple[ClientUpdate, State]:
    """What a trained client uploads, and its personal state (not copied).

    Raises:
        ClientError: The personal state is not finite. (The server checks the update.)
    """
    update = client.make_update(context, before)
    personal = select_state(client, client.kept_names(), clone=False)
    _check_finite_state(personal, context)
    return update, personal


def phase_data(client: FederatedClient, phase: Phase, context: FitContext) -> FitData:
    """The client's data with the settings of the phase that it has entered.

    In a plain phase, for which no ``drop_last`` can be set, a last batch of a single sample is left out where batch
    normalization trains, which cannot take it; the order being random, it is another sample in every epoch.
    """
    normed = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in client.modules())
    return context.data.for_phase(phase.batch_size, phase.plain, leave_out_single=phase.plain and normed)


@contextmanager
def _explained(context: FitContext, phase: Phase) -> Iterator[None]:
    """Say what batch normalization means when it meets a batch of one sample."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Expected more than 1 value per channel"):
            raise
        count, size = context.data.num_samples, context.data.batch_size
        if phase.plain and count == 1:
            raise ClientError(
                context.client,
                context.round,
                f"batch normalization cannot train in phase {phase.name!r} on the client's only training sample; give "
                "it more samples, or train the head alone",
            ) from error
        advice = "choose another batch_size" if phase.plain else "set drop_last to true, or choose another batch_size"
        raise ConfigurationError(
            f"client {context.client}, round {context.round}: batch normalization cannot train on a batch of one "
            f"sample, and the {count} training samples in batches of {size} leave such a batch; {advice}"
        ) from error


def trains(module: nn.Module) -> bool:
    """Whether any parameter trains in the current phase."""
    return any(parameter.requires_grad for parameter in module.parameters())


def _hold_statistics_of_frozen_parts(client: FederatedClient) -> None:
    """Frozen means frozen: running statistics of a part that does not train are used, not updated."""
    for layer in client.frozen_norms():
        layer.eval()


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


def _check_finite_state(state: State, context: FitContext) -> None:
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ClientError(
                context.client,
                context.round,
                f"{name} is not finite after the local fit; lower the learning rate, clip the gradient, "
                "or look at this client's data",
            )


def means(steps: Mapping[str, Sequence[Tensor]]) -> Losses:
    """Means over the steps, by name."""
    return {name: float(torch.stack(list(values)).float().mean()) for name, values in steps.items()}
