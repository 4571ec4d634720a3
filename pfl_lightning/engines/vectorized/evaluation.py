"""Evaluation of many clients at once: groups, fine-tuning, and the fallback to one client after another."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch

from pfl_lightning.client import FederatedClient
from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.evaluation import SplitMetrics, load_own_state
from pfl_lightning.engines.lifecycle import enter_phase, local_fit
from pfl_lightning.engines.notices import naming_clients
from pfl_lightning.engines.preparation import forget_preparation
from pfl_lightning.engines.sequential import frozen_features
from pfl_lightning.engines.tasks import EvaluationResult, EvaluationTask, FitEnvironment
from pfl_lightning.engines.vectorized.grouping import run_by_module
from pfl_lightning.engines.vectorized.limits import CannotVectorizeError, guarded_attributes
from pfl_lightning.engines.vectorized.stack import Member, by_kind, full_state, put_state
from pfl_lightning.engines.vectorized.stacked_evaluation import score_stack
from pfl_lightning.errors import ClientError
from pfl_lightning.seeding import Purpose

__all__ = ["VectorizedEvaluation"]


class VectorizedEvaluation(Engine):
    """Evaluation half of :class:`~pfl_lightning.engines.VectorizedEngine`.

    Clients of one architecture are fine-tuned together, if their method fine-tunes, as they are trained together. Then
    their forward passes are vectorized. Either step may run client by client without the other.

    Args:
        clients_per_batch: See :class:`~pfl_lightning.engines.VectorizedEngine`.
        gradient_clip_val: See :class:`~pfl_lightning.engines.Engine`.
        gradient_clip_algorithm: See :class:`~pfl_lightning.engines.Engine`.
    """

    cache_features: bool
    forward: str

    def __init__(
        self,
        clients_per_batch: int,
        gradient_clip_val: float | None,
        gradient_clip_algorithm: str,
        threads: int | None = None,
    ) -> None:
        super().__init__(gradient_clip_val, gradient_clip_algorithm, threads)
        self.clients_per_batch = clients_per_batch
        self._evaluated_at_once = clients_per_batch  # less after an out-of-memory error
        self._evaluated_alone = _Modules()
        self._forward_alone = _Modules()

    @abstractmethod
    def vectorizes_forward(self, client: FederatedClient, environment: FitEnvironment) -> bool:
        """Whether forward passes are vectorized, or only the rest."""

    @abstractmethod
    def _must_run_alone(self, client: FederatedClient) -> bool:
        """Whether the client's training cannot be vectorized; says why, once."""

    @abstractmethod
    def _train_stack(
        self,
        client: FederatedClient,
        members: list[Member],
        environment: FitEnvironment,
        refuse_changes: Callable[[str], None],
        purpose: str,
    ) -> None:
        """Train members of one kind through their phases, seeded for a purpose; they hold their trained states."""

    @abstractmethod
    def _say(self, message: str) -> None:
        """Log a message, unless it was logged before."""

    def evaluate(
        self, tasks: Iterable[tuple[FederatedClient, EvaluationTask]], environment: FitEnvironment
    ) -> Iterator[EvaluationResult]:
        """Evaluate clients, as many at once as allowed; results in the tasks' order; see :meth:`Engine.evaluate`."""
        return run_by_module(
            tasks,
            self.clients_per_batch,
            lambda client, alike: self._evaluate_alike(client, alike, environment),
            keep=lambda result: result,
        )

    def _evaluate_alike(
        self, client: FederatedClient, tasks: list[EvaluationTask], environment: FitEnvironment
    ) -> Iterator[EvaluationResult]:
        """Evaluate clients of one architecture."""
        rest = tasks
        while rest:
            group, rest = rest[: self._evaluated_at_once], rest[self._evaluated_at_once :]
            yield from self._evaluate_group(client, group, environment)

    def _evaluate_group(
        self, client: FederatedClient, group: list[EvaluationTask], environment: FitEnvironment
    ) -> Iterator[EvaluationResult]:
        together, results = self._goes_together(client, group, environment), None
        if together:
            try:
                with naming_clients(*(task.context.client for task in group), round=group[0].context.round):
                    results = self._evaluate_together(client, group, environment)
            except CannotVectorizeError as error:
                together = False
                self._evaluated_alone.add(client)
                self._say_why(error)
            except ClientError:
                together = False  # one by one, the error belongs to a known client
            except torch.OutOfMemoryError:
                self._evaluated_at_once = (len(group) + 1) // 2
                self._say(
                    f"{len(group)} clients at once need too much memory in the evaluation; going on with "
                    f"{self._evaluated_at_once} at once"
                )
        if results is not None:
            yield from results
        elif not together:
            yield from super().evaluate(((client, task) for task in group), environment)
        else:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            yield from self._evaluate_alike(client, group, environment)

    def _say_why(self, error: CannotVectorizeError) -> None:
        if not error.silent:
            self._say(f"{error.reason}. Its clients are evaluated one by one, as under SequentialEngine")

    def _goes_together(
        self, client: FederatedClient, group: Sequence[EvaluationTask], environment: FitEnvironment
    ) -> bool:
        # A user-defined LightningModule is evaluated by its own steps, and a method may have its own evaluation.
        own = client.step_module is client and type(client).evaluate is FederatedClient.evaluate
        if len(group) == 1 or not own or client in self._evaluated_alone or client.uses_knn_evaluation():
            return False
        if client.personalization_phases():
            # Where forward passes are not vectorized, "auto" tunes one by one: an optimizer shared gains nothing.
            return self.forward == "loop" or self.vectorizes_forward(client, environment)
        return self._vectorizes_scores(client, environment)

    def _vectorizes_scores(self, client: FederatedClient, environment: FitEnvironment) -> bool:
        """Whether the forward passes without gradients are vectorized.

        On a CPU they take about as long one by one, unless they are very small: there is neither a backward pass nor
        an optimizer's step to share.
        """
        if client in self._forward_alone or (self.forward == "auto" and environment.device.type == "cpu"):
            return False
        return self.vectorizes_forward(client, environment)

    # ------------------------------------------------------------------ a group

    def _evaluate_together(
        self, client: FederatedClient, group: Sequence[EvaluationTask], environment: FitEnvironment
    ) -> list[EvaluationResult] | None:
        """Results in order; ``None`` if the forward pass cannot be vectorized, which may have changed the states."""
        members = self._own_models(client, group, environment)
        scores: dict[Member, SplitMetrics] = {}
        for alike in by_kind(members):
            try:
                scores |= zip(alike, self._scores(client, alike, environment), strict=True)
            except CannotVectorizeError as error:
                self._forward_alone.add(client)
                self._say_why(error)
                return None
        put_state(client, members[-1].state)  # as if it had been evaluated after the others
        forget_preparation(client)
        client.eval()
        return [EvaluationResult(member.context.client, *scores[member], member.error) for member in members]

    def _own_models(
        self, client: FederatedClient, group: Sequence[EvaluationTask], environment: FitEnvironment
    ) -> list[Member]:
        """Models of the clients, fine-tuned; see :meth:`Engine.load_own_model`."""
        members = list[Member]()
        with guarded_attributes(client) as refuse_changes:
            for task in group:
                members.append(self._own_model(client, task, environment))
                refuse_changes("receive, before_evaluation or personalization_phases")
            for alike in by_kind(member for member in members if member.phases):
                with torch.enable_grad():
                    self._train_stack(client, alike, environment, refuse_changes, Purpose.PERSONALIZE)
        for member, task in zip(members, group, strict=True):
            member.features = None
            if member.error is not None:
                load_own_state(client, task, environment)
                member.state = full_state(client)
        return members

    def _own_model(self, client: FederatedClient, task: EvaluationTask, environment: FitEnvironment) -> Member:
        """Model of a client, before any fine-tuning."""
        load_own_state(client, task, environment)
        context = task.context
        member = Member(task, context, tuple(client.personalization_phases()))
        if member.phases:
            if self._must_run_alone(client):
                raise CannotVectorizeError("its training is not vectorized", silent=True)
            if self.cache_features:
                enter_phase(client, member.phases[0])
                with local_fit(environment):
                    member.features = frozen_features(client, context)
        member.state = full_state(client)
        return member

    def _scores(
        self, client: FederatedClient, members: list[Member], environment: FitEnvironment
    ) -> list[SplitMetrics]:
        """Scores of members of one kind, in order."""
        client.eval()
        if len(members) > 1 and self._vectorizes_scores(client, environment):
            put_state(client, members[0].state)  # of another kind it may hold other buffers, such as another bank
            return score_stack(client, members, environment)
        found = []
        for member in members:
            assert isinstance(member.task, EvaluationTask)
            put_state(client, member.state)
            with local_fit(environment):  # in which no cast of another client's weights is remembered
                found.append(self.score(client, member.task, environment))
        return found


class _Modules(WeakSet[FederatedClient]):
    """Set of modules with a property found at run time; a copy of the engine finds it again, for its own modules."""

    def __reduce__(self) -> Any:
        return (type(self), ())
