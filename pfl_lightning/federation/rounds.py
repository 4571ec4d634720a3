"""What a federation holds, and its rounds under the outer Trainer."""

from __future__ import annotations

from typing import cast

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from pfl_lightning.data import FederatedData
from pfl_lightning.engines import Engine, FitEnvironment
from pfl_lightning.errors import ConfigurationError, FederationError
from pfl_lightning.facts import RunFacts
from pfl_lightning.federation.progress_bar import name_round
from pfl_lightning.fit.tasks import Clock
from pfl_lightning.lightning_private import has_trainer
from pfl_lightning.round import Round, Traffic
from pfl_lightning.server import Aggregator
from pfl_lightning.state.architectures import ArchitectureSummary
from pfl_lightning.state.clients import Clients, GroupedStates
from pfl_lightning.state.update_norms import UpdateGuard

__all__ = ["FederationRounds"]


class FederationRounds(L.LightningModule):
    """Clients, server and engine, and the communication rounds: one epoch each, one training batch a local fit."""

    engine: Engine
    """How local fits and evaluations run."""

    seed: int
    """Seed of everything random."""

    models: nn.ModuleList
    """One module for each architecture, which its clients use in turn."""

    clients: Clients
    """Modules and stored states of all clients."""

    server: Aggregator
    """Receives the updates and says what clients get."""

    round: int
    """The last round that was trained; the fine-tuning before an evaluation draws by it."""

    _current_round: Round | None

    @property
    def data(self) -> FederatedData:
        """The data module of the Trainer that this federation is attached to."""
        if not has_trainer(self):
            raise ConfigurationError(
                "this federation belongs to no Trainer, and so has no clients' data: a copy, or one that was read from "
                "a file, has none. Ask the one that was fitted, write its models by export_clients, or give this one "
                "to a Trainer: trainer.validate(federation, datamodule=..., ckpt_path=...)"
            )
        datamodule = getattr(self.trainer, "datamodule", None)
        if datamodule is None or not hasattr(datamodule, "client_data"):
            raise ConfigurationError(
                "a Federation needs a FederatedDataModule: trainer.fit(federation, datamodule=...); "
                f"got {type(datamodule).__name__}. pfl_lightning.datamodules.FromLightning and FromDatasets wrap "
                "others, and pfl_lightning.federate gives one"
            )
        return cast(FederatedData, datamodule)

    @property
    def method_name(self) -> str:
        """Name of the method, such as ``FedPAC``."""
        return type(self.models[0]).__name__

    @property
    def is_set_up(self) -> bool:
        """Whether there are clients: the Trainer's fit, validate or test has shown the data."""
        return len(self.models) > 0

    @property
    def num_clients(self) -> int:
        """Number of clients, m."""
        return self.personal.num_clients

    @property
    def personal(self) -> GroupedStates:
        """What every client has stored."""
        return self.clients.personal

    @property
    def rounds_trained(self) -> list[int]:
        """For each client, the rounds in which the server has taken an update of it."""
        counted: list[int] = self.clients.rounds_trained.tolist()
        return counted

    @property
    def never_trained(self) -> list[int]:
        """Clients that could take part in rounds and trained in none; empty before any training."""
        rounds = self.rounds_trained
        return [client for client in self.data.participating if not rounds[client]] if any(rounds) else []

    @property
    def architectures(self) -> list[ArchitectureSummary]:
        """What the architectures are and how many clients have each."""
        return self.clients.summaries

    @property
    def environment(self) -> FitEnvironment:
        """Settings of the outer Trainer and of the run that every local fit gets."""
        trainer = self.trainer
        rounds = (trainer.max_epochs or 0) if trainer.state.fn == TrainerFn.FITTING else 0
        precision, clip = str(trainer.precision), self.engine.gradient_clip_val
        facts = RunFacts(
            len(self.data.participating), rounds if rounds > 0 else None, gradient_clip_val=clip, precision=precision
        )
        clock = Clock(trainer.current_epoch, trainer.global_step, trainer.max_epochs)
        return FitEnvironment(self.seed, self.device, trainer.precision_plugin, precision, facts, clock)

    # ------------------------------------------------------------------ a round

    def begin_round(self, traffic: Traffic, guard: UpdateGuard, on_client_error: str = "skip") -> Round:
        """Begin the Trainer's current round: hand its cohort to the engine.

        Args:
            traffic: Counts the messages of the round.
            guard: Compares the updates.
            on_client_error: See :class:`~pfl_lightning.round.Round`.
        """
        trainer, data = self.trainer, self.data
        if trainer.current_epoch == 0 and self.clients.carried is not None:
            self.clients.carried.clear()  # a Trainer that starts at round 0 resumes no schedules
        cohort = data.current_cohort()[: int(trainer.num_training_batches)]
        given = self.clients, self.server, data, self.environment, traffic, guard, on_client_error
        begun = Round(trainer.current_epoch, cohort, *given)
        begun.fits = self.engine.run(begun.broadcasts(), begun.environment)
        self._current_round = begun
        return begun

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """Fit the clients of the batch and pass their updates on to the server."""
        if self._current_round is None:
            raise FederationError("no round has begun: a FederatedLoop must be among the Trainer's callbacks")
        if batch_idx == 0 and self.trainer.progress_bar_callback is not None:
            name_round(self.trainer)
        for client in batch.tolist():
            result = self._current_round.fit_next(client)
            self.round, self.has_trained = result.round, True
            if "loss" in result.losses:
                progress = {"round": result.round + 1.0, "client": float(client), "loss": result.losses["loss"]}
                # Where progress bars and callbacks find them; `log` would take milliseconds to bring them there.
                self.trainer.progress_bar_metrics.update(progress)
                self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in progress.items()})
