"""Evaluation of many clients at once: groups, fine-tuning, and the fallback to one client after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from pfl_lightning.client import FederatedClient
from pfl_lightning.engines.lifecycle import SplitMetrics, enter_phase, forget_preparation, load_own_state, local_fit
from pfl_lightning.engines.sequential import frozen_features
from pfl_lightning.engines.vectorized.groups import Groups
from pfl_lightning.engines.vectorized.limits import CannotVectorizeError, guarded_attributes, refuse_unusual
from pfl_lightning.engines.vectorized.stack import Member, by_kind, full_state, put_state
from pfl_lightning.engines.vectorized.stacked_evaluation import score_stack
from pfl_lightning.errors import ClientError
from pfl_lightning.fit.tasks import EvaluationResult, EvaluationTask, FitEnvironment
from pfl_lightning.notices import naming_clients
from pfl_lightning.seeding import Purpose

if TYPE_CHECKING:
    from pfl_lightning.engines.vectorized.engine import VectorizedEngine

__all__ = ["StackedEvaluation"]


class StackedEvaluation:
    """Evaluations of :class:`~pfl_lightning.engines.VectorizedEngine`.

    Clients of one architecture are fine-tuned together, if their method fine-tunes, as they are trained together. Then
    their forward passes are vectorized. Either step may run client by client without the other.

    Args:
        engine: The engine, which fine-tunes clients, and scores single ones.

    Attributes:
        groups: The groups that clients are taken in.
        forward: The same of modules whose forward passes are not vectorized.
    """

    def __init__(self, engine: VectorizedEngine) -> None:
        self._engine = engine
        self.groups, self.forward = (
            Groups[EvaluationTask, EvaluationResult](engine.clients_per_batch, engine.log, "evaluated")
            for _ in range(2)
        )

    def run(
        self,
        tasks: Iterable[tuple[FederatedClient, EvaluationTask]],
        environment: FitEnvironment,
        one_by_one: Callable[..., Iterator[EvaluationResult]],
    ) -> Iterator[EvaluationResult]:
        """Evaluate clients; results in the tasks' order.

        Args:
            tasks: Modules and their tasks.
            environment: Settings of the outer Trainer and of the run.
            one_by_one: Evaluates clients that cannot be evaluated together.
        """
        return self.groups.run(
            tasks,
            together=lambda client, group: self._together(client, group, environment),
            alone=lambda client, group: one_by_one(((client, task) for task in group), environment),
            keep=lambda result: result,
        )

    def _together(
        self, client: FederatedClient, group: list[EvaluationTask], environment: FitEnvironment
    ) -> list[EvaluationResult] | None:
        """Results of clients of one architecture; ``None`` where they are to be evaluated one by one."""
        if not self._goes_together(client, environment):
            return None
        try:
            with naming_clients(*(task.context.client for task in group), round=group[0].context.round):
                return self._evaluate_together(client, group, environment)
        except ClientError:
            return None  # one by one, the error belongs to a known client

    def _goes_together(self, client: FederatedClient, environment: FitEnvironment) -> bool:
        # A user-defined LightningModule is evaluated by its own steps, and a method may have its own evaluation.
        own = client.step_module is client and type(client).evaluate is FederatedClient.evaluate
        if not own or client.uses_knn_evaluation():
            return False
        if client.personalization_phases():
            return self._engine.vectorizes(client, environment)
        return self._vectorizes_scores(client, environment)

    def _vectorizes_scores(self, client: FederatedClient, environment: FitEnvironment) -> bool:
        """Whether the forward passes without gradients are vectorized.

        On a CPU they take about as long one by one, unless they are very small: there is neither a backward pass nor
        an optimizer's step to share.
        """
        if client in self.forward.reasons or (self._engine.forward == "auto" and environment.device.type == "cpu"):
            return False
        return self._engine.vectorizes(client, environment)

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
                self.forward.note(client, error)
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
                    self._engine.train_stack(client, alike, environment, refuse_changes, Purpose.PERSONALIZE)
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
            if client in self._engine.fits.reasons:
                raise CannotVectorizeError("its training is not vectorized", silent=True)
            refuse_unusual(client)
            if self._engine.cache_features:
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
                found.append(self._engine.score(client, member.task, environment))
        return found
