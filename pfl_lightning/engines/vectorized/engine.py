"""An engine that trains many clients of one architecture at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from pfl_lightning.checks import check_at_least, check_choice
from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.engines.base import Engine, naming_clients
from pfl_lightning.engines.lifecycle import (
    conclude,
    enter_phase,
    failure,
    forget_preparation,
    load_own_state,
    trains,
    without_autocast,
)
from pfl_lightning.engines.sequential import SequentialEngine, frozen_features
from pfl_lightning.engines.vectorized.choice import seconds_of_step
from pfl_lightning.engines.vectorized.graphs import make_computation
from pfl_lightning.engines.vectorized.groups import Groups, Task
from pfl_lightning.engines.vectorized.limits import (
    CannotVectorizeError,
    guarded_attributes,
    refuse_unusual,
)
from pfl_lightning.engines.vectorized.phase import clip_per_client, run_stacked_phase
from pfl_lightning.engines.vectorized.stack import Member, Stack, full_state, in_state, prepare, prepare_evaluation
from pfl_lightning.engines.vectorized.step import Computation, Measure, StepInputs
from pfl_lightning.errors import ClientError, FederationError
from pfl_lightning.fit.tasks import (
    EvaluationResult,
    EvaluationTask,
    FitEnvironment,
    FitResult,
    FitTask,
    PhaseResult,
)
from pfl_lightning.seeding import Purpose, derive_seed, torch_seed

SMALL = 50_000
"""Parameters up to which a forward pass on a CPU takes longer to arrange than to compute."""

_log = logging.getLogger(__name__)


class VectorizedEngine(Engine):
    """Engine that trains and fine-tunes many clients of one architecture at once, by ``torch.func``.

    Parameters and buffers of the clients are stacked along a leading axis, and the very ``training_step`` that the
    other engines call is vectorized over it (``functional_call`` under ``vmap``). The optimizer is the client's own,
    over the stacked parameters, or over each client's rows (with a schedule, say). Schedules, clipping by norm,
    batch-normalization statistics and dropout are each client's own, and so are the order and the number of its
    batches: one that has finished stays as it is. Incomplete batches are padded, and the padding masked, where the loss
    is a mean over samples (``averages_samples`` of the class, checked on a first batch); where it is not, under batch
    normalization that trains and under dropout, clients with batches of different sizes are computed in turn. One or
    two clients of many are computed without ``vmap``.

    The results are those of :class:`~pfl_lightning.engines.SequentialEngine` up to rounding. Where the forward pass is
    random (dropout), they are equally distributed, but the draws are others, and they depend on which clients are
    trained together. (So are those of the model that ``Federation.client_model`` fine-tunes, alone.)

    An evaluation fine-tunes clients together, where their method does so, and scores them one by one.

    A client that cannot be vectorized runs as under ``SequentialEngine``, and the reason is logged once: it overrides
    hooks, optimizes manually, calls ``.item()``, branches on data, assigns Python attributes or changes their lists,
    dictionaries or sets (put what differs between clients into a non-persistent buffer), uses a parameter for some of
    the batches that are computed together, or returns a loss term in some steps only. So does a client alone in its
    group. Other objects that are changed in place are not noticed. ``receive``, ``before_fit``, ``make_update``, an
    augmentation of the user's own and evaluation go client by client. Under precision ``16-mixed``, in which every
    client has a loss scale of its own, all do: ``bf16-mixed`` needs none.

    Args:
        clients_per_batch: Largest number of clients trained, or fine-tuned, together. Memory on the device grows with
            it; after an out-of-memory error the group is halved and starts again.
        gradient_clip_val: See :class:`~pfl_lightning.engines.Engine`; each client's gradients are clipped alone.
        gradient_clip_algorithm: See :class:`~pfl_lightning.engines.Engine`.
        cache_features: See :class:`~pfl_lightning.engines.SequentialEngine`.
        forward: ``"vmap"`` trains clients at once, ``"loop"`` one by one as under ``SequentialEngine``. ``"auto"``
            trains at once, except that on a CPU models with convolutions, and large ones, are trained one by one, which
            takes no longer there and a fraction of the memory (``python benchmarks/engines.py --forward vmap`` times
            the other choice). On another device it times a few steps of each architecture in both ways, takes the
            faster one from then on, says so once, and keeps it in checkpoints and ``results.json``; under
            ``deterministic``, and with ``cuda_graphs``, nothing is timed, and clients are trained at once.
        cuda_graphs: Whether steps are captured as CUDA graphs and replayed, which spares the launches of single
            kernels: all clients of a stack with whole batches, after three steps of a phase. Steps that draw random
            numbers (dropout) are not captured, with one log line. A step that cannot be captured, since it waits for
            the device or sends it something, ends the run with an error. Without a CUDA device it has no effect.
        threads: See :class:`~pfl_lightning.engines.Engine`.
    """

    def __init__(
        self,
        clients_per_batch: int = 32,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        cache_features: bool = True,
        forward: str = "auto",
        cuda_graphs: bool = False,
        threads: int | None = None,
    ) -> None:
        check_at_least("clients_per_batch", clients_per_batch, 1)
        super().__init__(gradient_clip_val, gradient_clip_algorithm, threads)
        self.clients_per_batch, self.cache_features = clients_per_batch, cache_features
        check_choice("forward", forward, ("auto", "vmap", "loop"))
        self.forward, self.cuda_graphs = forward, cuda_graphs
        self.clock = time.perf_counter
        self._one_by_one = SequentialEngine(gradient_clip_val, gradient_clip_algorithm, cache_features)
        clip = partial(clip_per_client, limit=gradient_clip_val or 0.0, algorithm=gradient_clip_algorithm)
        self._clip = None if gradient_clip_val is None else clip
        self._warned: set[str] = set()
        self._make_computation = partial(make_computation, cuda_graphs=cuda_graphs, log=self.log)
        self.groups = Groups(clients_per_batch, self.log)

    def run_phase(
        self, client: FederatedClient, phase: Phase, context: FitContext, environment: FitEnvironment, purpose: str
    ) -> PhaseResult:
        """Train a single client, as ``SequentialEngine`` does."""
        return self._one_by_one.run_phase(client, phase, context, environment, purpose)

    def run(self, tasks: Iterable[tuple[FederatedClient, FitTask]], environment: FitEnvironment) -> Iterator[FitResult]:
        """Run the local fits of a round, those of one architecture together; see :meth:`Engine.run`."""
        return self.groups.run(tasks, self._fit_together, super().run, environment)

    def evaluate(
        self, tasks: Iterable[tuple[FederatedClient, EvaluationTask]], environment: FitEnvironment
    ) -> Iterator[EvaluationResult]:
        """Evaluate clients, fine-tuned together; see :meth:`Engine.evaluate`."""
        return self.groups.run(tasks, self._evaluate_together, super().evaluate, environment)

    def log(self, message: str) -> None:
        """Log a message, unless it was logged before."""
        if message not in self._warned:
            self._warned.add(message)
            _log.warning("VectorizedEngine: %s", message)

    def vectorizes(self, client: FederatedClient, environment: FitEnvironment) -> bool:
        """Whether several clients are trained, or fine-tuned, at once, as far as that is this engine's choice."""
        if environment.precision.precision == "16-mixed":
            self.log("under 16-mixed every client has its own loss scale, and clients run one by one; use bf16-mixed")
            return False
        if self.forward != "auto" or environment.device.type != "cpu":
            return self.forward != "loop" and self.choices.get(_architecture(client)) != "loop"
        convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in client.modules())
        return not convolves and sum(p.numel() for p in client.parameters()) < SMALL

    def _measure(self, client: FederatedClient, environment: FitEnvironment) -> Measure | None:
        """What times the first step of an architecture, where that is to be done."""
        name, fixed = _architecture(client), torch.are_deterministic_algorithms_enabled() or self.cuda_graphs
        if self.forward != "auto" or environment.device.type == "cpu" or fixed or name in self.choices:
            return None

        def measure(compute: Computation, inputs: StepInputs, index: int) -> None:
            together, alone = seconds_of_step(compute, inputs, index, self.clock)
            self.choices[name] = "vmap" if together <= alone else "loop"
            times = f"{1000 * together:.3g} ms at once and {1000 * alone:.3g} ms sequentially"
            said = f"a step of {len(inputs.batch[0])} clients of {name} takes {times}"
            if together > alone:
                raise CannotVectorizeError(said)
            rank_zero_info(f"VectorizedEngine: {said}")

        return measure

    # ------------------------------------------------------------------ a group

    def _fit_together(
        self, client: FederatedClient, group: list[FitTask], environment: FitEnvironment
    ) -> Iterator[FitResult] | None:
        """Run tasks of one architecture at once; ``None`` where they are to be run one by one."""
        if not self.vectorizes(client, environment):
            return None
        start = time.perf_counter()
        try:
            members = self._train(client, group, environment, prepare, "receive, before_fit or phases", Purpose.FIT)
        except (CannotVectorizeError, torch.OutOfMemoryError, FederationError):
            raise
        except Exception as error:  # one by one, it belongs to a known client
            _log.debug("the training of %d clients at once ended", len(group), exc_info=error)
            return None
        seconds = (time.perf_counter() - start) / len(members)
        return (self._conclude(client, member, environment, seconds) for member in members)

    def _evaluate_together(
        self, client: FederatedClient, group: list[EvaluationTask], environment: FitEnvironment
    ) -> list[EvaluationResult] | None:
        """Fine-tune clients of one architecture at once and score them; ``None`` where it is to be done one by one."""
        # A user's LightningModule is evaluated by its own steps, and a method may have its own evaluation.
        usual = client.step_module is client and type(client).evaluate is FederatedClient.evaluate
        tunes = usual and client.personalization_phases() and not client.uses_knn_evaluation()
        if not tunes or not self.vectorizes(client, environment):
            return None
        where = "receive, before_evaluation or personalization_phases"
        try:
            members = self._train(client, group, environment, prepare_evaluation, where, Purpose.PERSONALIZE)
        except ClientError:
            return None  # one by one, the error belongs to a known client
        results = list[EvaluationResult]()
        for member in members:
            task = cast(EvaluationTask, member.task)
            failed = member.error is not None
            with naming_clients(member.context), nullcontext() if failed else in_state(client, member.state):
                if failed:
                    load_own_state(client, task, environment)
                client.eval()
                scores = self.score(client, task, environment)
            results.append(EvaluationResult(member.context.client, *scores, member.error))
        forget_preparation(client)
        return results

    def _train(
        self,
        client: FederatedClient,
        group: list[Task],
        environment: FitEnvironment,
        begin: Callable[[FederatedClient, Task, FitEnvironment, bool], Member],
        where: str,
        purpose: str,
    ) -> list[Member]:
        """Train a group through all phases, seeded for a purpose; the members hold their trained states."""
        refuse_unusual(client)
        members, stacks = list[Member](), dict[object, Stack]()
        named = naming_clients(*(task.context for task in group))
        with named, guarded_attributes(client) as refuse_changes:
            for number, task in enumerate(group):
                members.append(member := begin(client, task, environment, self.cache_features))
                refuse_changes(where)
                if member.error is None:
                    state = full_state(client)
                    if (kind := member.kind(state)) not in stacks:
                        stacks[kind] = Stack(len(group) - number, state)
                    stacks[kind].add(member, state)
            for stack in stacks.values():
                if stack.members[0].phases:
                    with torch.enable_grad():
                        self.train_stack(client, stack, environment, refuse_changes, purpose)
        return members

    def train_stack(
        self,
        client: FederatedClient,
        stack: Stack,
        environment: FitEnvironment,
        refuse_changes: Callable[[str], None],
        purpose: str,
    ) -> None:
        """Train clients of one kind through their phases."""
        first = stack.members[0]
        numbers = [member.context.client for member in stack.members]
        seed = derive_seed(environment.seed, f"{purpose}/stack", first.context.round, *numbers)
        with in_state(client, first.state), without_autocast(environment), torch_seed(seed, python=True):
            for index, phase in enumerate(first.phases):
                if index > 0:
                    self._find_features(client, phase, stack)
                enter_phase(client, phase)
                own, pads = f"{purpose}/{index}", client not in self.groups.unpadded
                measure, make = self._measure(client, environment), self._make_computation
                run_stacked_phase(client, phase, stack, environment, own, self._clip, make, pads, measure)
                refuse_changes("configure_optimizers or training_step")
                stack.keep([member for member in stack.members if member.error is None])
                if not stack.members:
                    return
                if trains(client.encoder):
                    for member in stack.members:
                        member.context.data.cached_features = None
        for member in stack.members:
            member.state = stack.row(member)

    def _find_features(self, client: FederatedClient, phase: Phase, stack: Stack) -> None:
        """Compute the features of a later phase whose encoder is frozen."""
        for member in stack.members:
            member.features = None
        enter_phase(client, phase)
        if not self.cache_features or trains(client.encoder):
            return
        found = []
        for member in stack.members:
            with in_state(client, stack.row(member)):
                found.append(frozen_features(client, member.context))
            if found[-1] is None:
                return
        for member, features in zip(stack.members, found, strict=True):
            member.features = features

    def _conclude(
        self, client: FederatedClient, member: Member, environment: FitEnvironment, seconds: float
    ) -> FitResult:
        """Result of a fit, computed after the last phase on the module in the client's trained state."""
        context, start = member.context, time.perf_counter() - seconds
        if member.error is not None:
            return FitResult.failed(context, seconds, member.error)
        with naming_clients(context), in_state(client, member.state):
            try:
                assert member.random_state is not None
                if member.phases:  # again for each, as make_update may change modes and leave gradients
                    enter_phase(client, member.phases[-1])
                else:
                    client.train()
                seed = derive_seed(environment.seed, Purpose.FIT_MODEL, context.round, context.client)
                with without_autocast(environment), torch_seed(seed, python=True):
                    member.random_state.restore(environment.device)
                    context = replace(context, num_steps=member.num_steps, is_cut=member.is_cut)
                    return conclude(client, context, member.before, member.losses, start)
            except Exception as error:
                failed = failure(error, client, context, environment).with_traceback(None)
                return FitResult.failed(context, time.perf_counter() - start, failed)


def _architecture(client: FederatedClient) -> str:
    """Name of the architecture of a module, the same in every run of it."""
    return f"{type(client.encoder).__name__} ({sum(p.numel() for p in client.parameters())} parameters)"
