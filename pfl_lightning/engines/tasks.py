"""Tasks of an engine, and their results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision

from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.data import FederatedData, FitData, SplitSource
from pfl_lightning.errors import ClientError
from pfl_lightning.facts import RunFacts
from pfl_lightning.messages import Broadcast, ClientUpdate, State
from pfl_lightning.metrics import EvalMetrics

__all__ = [
    "EvaluationResult",
    "EvaluationTask",
    "FitEnvironment",
    "FitResult",
    "FitTask",
    "Losses",
    "MakeTrainer",
    "PhaseResult",
    "make_context",
]

Losses = dict[str, float]
"""Means over the steps of a fit, by the name of the loss term."""

MakeTrainer = Callable[..., L.Trainer | None]
"""Makes an inner Trainer from callbacks and options of ``L.Trainer``; gives ``None`` where an engine has none."""


@dataclass(frozen=True)
class FitEnvironment:
    """Settings of the outer Trainer and of the run that every local fit gets.

    Attributes:
        seed: The run's seed.
        device: Where clients train.
        precision: Lightning's precision plugin; ``None`` trains in the module's own precision.
        precision_name: Precision of an inner Trainer, such as ``"bf16-mixed"``.
        facts: Facts about the run that local fits may ask for.
    """

    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision | None = None
    precision_name: str = "32-true"
    facts: RunFacts = field(default_factory=RunFacts)

    def forward_context(self) -> AbstractContextManager[object]:
        """The context of every forward pass."""
        return nullcontext() if self.precision is None else self.precision.forward_context()

    def convert_input(self, data: Any) -> Any:
        """Inputs in the type that the precision asks for, such as double under ``64-true``."""
        return data if self.precision is None else self.precision.convert_input(data)

    def fit_context(self) -> AbstractContextManager[object]:
        """The context of a local fit, which leaves the outer Trainer's autocast.

        It then holds in the forward passes alone, and no cast of a weight outlives the step that changes the weight.
        """
        return torch.autocast(self.device.type, enabled=False, cache_enabled=False)


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
        environment.forward_context,
        environment.convert_input,
        None if part is own.train else own.train,
    )
    return FitContext(client, round, fit_data, environment.facts)


@dataclass(frozen=True)
class FitTask:
    """One client's fit in one round: everything it needs, and nothing of another client.

    Attributes:
        context: Client, round and training data.
        broadcast: Message of the server.
        personal: The client's personal state, as it was stored.
    """

    context: FitContext
    broadcast: Broadcast
    personal: State


@dataclass(frozen=True)
class PhaseResult:
    """Outcome of one phase of a local fit.

    Attributes:
        losses: Means over the steps, by the name of the loss term.
        num_steps: Number of optimizer steps taken, see :class:`~pfl_lightning.client.FitContext`.
    """

    losses: Losses
    num_steps: int


@dataclass(frozen=True)
class FitResult:
    """Outcome of a :class:`FitTask`.

    Attributes:
        client: Number of the client.
        round: Number of the round.
        update: The upload; ``None`` when the fit failed.
        personal: The personal state after the fit; empty when the fit failed.
        losses: Means over the steps of a phase, averaged over the phases that have the term, by name.
        seconds: Wall time of the fit.
        error: Why the fit failed.
        logged: Values that the module itself logged, apart from the terms of the loss, by name.
        num_samples: Samples that the client trained on; its weight in means of what was logged.
    """

    client: int
    round: int
    update: ClientUpdate | None
    personal: State
    losses: Losses
    seconds: float
    error: ClientError | None = None
    logged: Losses = field(default_factory=dict)
    num_samples: int = 0

    def with_own_state(self) -> FitResult:
        """Return the result with a copy of the personal state, which stays valid when the next client is fitted."""
        return replace(self, personal={name: value.clone() for name, value in self.personal.items()})


@dataclass(frozen=True)
class EvaluationTask:
    """One client's own model and the parts of its data that it is evaluated on.

    Attributes:
        context: Client, round, and training data for a fine-tuning before the evaluation.
        broadcast: Message that the server would send now.
        stored: The client's stored state.
        trained: Whether the stored state is the whole model as the last local fit left it, which is then evaluated;
            otherwise the model is the personal state under the broadcast.
        validation: The validation part; ``None`` leaves it out, as it does an empty one.
        test: The test part, likewise.
    """

    context: FitContext
    broadcast: Broadcast
    stored: State
    trained: bool
    validation: SplitSource | None = None
    test: SplitSource | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """Outcome of an :class:`EvaluationTask`.

    Attributes:
        client: Number of the client.
        validation: Of the validation part, if it was asked for and is not empty.
        test: Of the test part, likewise.
        finetune_failures: Why the client was evaluated without the fine-tuning that its method has.
    """

    client: int
    validation: EvalMetrics | None = None
    test: EvalMetrics | None = None
    finetune_failures: ClientError | None = None
