"""Evaluation of many clients: they are fine-tuned together, where their method does so, and scored one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch

from pfl_lightning.client import FederatedClient
from pfl_lightning.engines.lifecycle import enter_phase, forget_preparation, load_own_state, local_fit
from pfl_lightning.engines.sequential import frozen_features
from pfl_lightning.engines.vectorized.groups import Groups
from pfl_lightning.engines.vectorized.limits import CannotVectorizeError, guarded_attributes, refuse_unusual
from pfl_lightning.engines.vectorized.stack import Member, by_kind, full_state, put_state
from pfl_lightning.errors import ClientError
from pfl_lightning.fit.tasks import EvaluationResult, EvaluationTask, FitEnvironment
from pfl_lightning.notices import naming_clients
from pfl_lightning.seeding import Purpose

if TYPE_CHECKING:
    from pfl_lightning.engines.vectorized.engine import VectorizedEngine


class StackedEvaluation:
    """Evaluations of :class:`~pfl_lightning.engines.VectorizedEngine`.

    Args:
        engine: The engine, which fine-tunes clients, and scores single ones.

    Attributes:
        groups: The groups that clients are taken in.
    """

    def __init__(self, engine: VectorizedEngine) -> None:
        self._engine = engine
        self.groups = Groups[EvaluationTask, EvaluationResult](engine.clients_per_batch, engine.log, "evaluated")

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
            one_by_one: Evaluates clients that are not fine-tuned together.
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
        # A user's LightningModule is evaluated by its own steps, and a method may have its own evaluation.
        usual = client.step_module is client and type(client).evaluate is FederatedClient.evaluate
        tunes = usual and client.personalization_phases() and not client.uses_knn_evaluation()
        if not tunes or not self._engine.vectorizes(client, environment):
            return None
        if client in self._engine.fits.reasons:
            raise CannotVectorizeError("its training is not vectorized", silent=True)
        refuse_unusual(client)
        try:
            with naming_clients(*(task.context.client for task in group), round=group[0].context.round):
                members = self._own_models(client, group, environment)
        except ClientError:
            return None  # one by one, the error belongs to a known client
        results = list[EvaluationResult]()
        for member in members:
            put_state(client, member.state)
            client.eval()
            with naming_clients(member.context.client, round=member.context.round):
                scores = self._engine.score(client, cast(EvaluationTask, member.task), environment)
            results.append(EvaluationResult(member.context.client, *scores, member.error))
        forget_preparation(client)
        return results

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
        """Model of a client, before its fine-tuning."""
        load_own_state(client, task, environment)
        member = Member(task, task.context, tuple(client.personalization_phases()))
        if member.phases and self._engine.cache_features:
            enter_phase(client, member.phases[0])
            with local_fit(environment):
                member.features = frozen_features(client, task.context)
        member.state = full_state(client)
        return member
