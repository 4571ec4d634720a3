"""When a federation's engine starts and stops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.client import FederatedClient
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.evaluation import Evaluation
from pfl_lightning.federation.personalization import PersonalizationStage
from pfl_lightning.federation.rounds import FederationRounds
from pfl_lightning.lightning_private import trainer_or_none
from pfl_lightning.phases import Personalization

__all__ = ["EngineHooks"]


class EngineHooks(FederationRounds):
    """Hooks of the outer Trainer that start the engine for local fits and evaluations, and stop it."""

    evaluation: Evaluation
    """The evaluation under way, or the last."""

    _personalization: Personalization | None
    _stage: PersonalizationStage | None

    def on_fit_start(self) -> None:
        """See whether clients have what the method needs, not when their turn comes; start the engine."""
        for model in self.clients.models:
            model.check_phases()
            model.check_run(self.environment.facts)
            if model.needs_validation:
                self._check_validation(type(model).__name__)
        if any(type(model).check_samples is not FederatedClient.check_samples for model in self.clients.models):
            groups: dict[int, dict[int, int]] = {}
            for client in self.data.participating:
                group = groups.setdefault(self.clients.architecture_of[client], {})
                own, model = self.data.client_data(client), self.clients.model_of(client)
                group[client] = len(own.train_and_unlabeled if model.uses_unlabeled_data else own.train)
            for index, samples in groups.items():
                self.clients.models[index].check_samples(samples)
        self._start_engine()

    def _check_validation(self, method: str) -> None:
        """Refuse clients without a validation part, by the first of them."""
        for client in self.data.participating:
            if not len(self.data.client_data(client).validation):
                raise ConfigurationError(
                    f"{method} needs validation samples of every client, and client {client} has none: set the data "
                    "module's validation_share"
                )

    def on_validation_start(self) -> None:
        """Let the engine get ready, unless a fit has done so."""
        if self.trainer.state.fn != TrainerFn.FITTING:
            self._start_engine()

    def on_test_start(self) -> None:
        """Let the engine get ready."""
        self._start_engine()

    @torch.inference_mode(False)  # whose tensors could not train
    def _start_engine(self) -> None:
        models, environment = self.clients.models, self.environment
        if self._personalization is not None:
            convert = self.trainer.precision_plugin.convert_module
            self._stage = PersonalizationStage(self._personalization, self.clients, self.data, environment, convert)
            models = self._stage.modules
        self.server.facts = replace(environment.facts, novel=frozenset(self.data.novel))
        self.engine.start(models, self.data, environment)

    @contextmanager
    def personalized(self, personalization: Personalization) -> Iterator[None]:
        """Inside, ``trainer.test`` lets every client adapt its model to its own data before it is evaluated.

        What the clients adapt is evaluated and then forgotten; the federation stays as it is.

        Args:
            personalization: What is adapted, and how.
        """
        self._personalization = personalization
        try:
            yield
        finally:
            self._personalization = None
            if self._stage is not None:  # the engine failed before there was anything to tear down
                self.stop_engine()

    @property
    def is_personalizing(self) -> bool:
        """Whether a test now is one of adapted models, inside of :meth:`personalized`."""
        return self._personalization is not None

    def teardown(self, stage: str) -> None:
        """Stop the engine."""
        self.stop_engine()

    def stop_engine(self) -> None:
        """Drop the local fits and evaluations under way and release the engine's resources."""
        if self._current_round is not None:
            self._current_round.drop()
            self._current_round = None
        self.evaluation.stop()
        self.engine.stop()
        self._release_data()
        if self._stage is not None:
            self._stage.close()
            self._stage = None

    def _release_data(self) -> None:
        """End the processes that read a project's data."""
        with suppress(ReferenceError):  # the Trainer is gone, and its data have heard of its end
            release = getattr(getattr(trainer_or_none(self), "datamodule", None), "release", None)
            if release is not None:
                release()
