"""What an engine is given and what it gives back."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData, FitData, SplitSource
from pfl_lightning.errors import ClientError
from pfl_lightning.messages import Broadcast, ClientUpdate, State
from pfl_lightning.metrics import EvalMetrics

__all__ = ["EvaluationResult", "EvaluationTask", "FitEnvironment", "FitResult", "FitTask", "Losses", "fit_data"]

Losses = dict[str, float]
"""Means over the steps of a fit, by the name of the loss term."""


@dataclass(frozen=True)
class FitEnvironment:
    """What the outer Trainer gives to every local fit.

    Attributes:
        seed: The run's seed.
        device: Where clients train.
        precision: Lightning's precision plugin; ``None`` trains in the module's own precision.
        precision_name: What an inner Trainer is given, such as ``"bf16-mixed"``.
    """

    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision | None = None
    precision_name: str = "32-true"

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


def fit_data(
    data: FederatedData, client: int, model: FederatedClient, environment: FitEnvironment, *, training: bool
) -> FitData:
    """A client's training part with the settings of its local fit.

    Args:
        data: Every client's data.
        client: Number of the client.
        model: The module of its architecture.
        environment: Where and in which precision it trains.
        training: Whether it is for a local fit, in which samples without labels may take part; not so in an evaluation
            and what comes before it.
    """
    own = data.client_data(client)
    part = own.train_and_unlabeled if training and model.uses_unlabeled_data else own.train
    return FitData(
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


@dataclass(frozen=True)
class FitTask:
    """One client's fit in one round: everything it needs, and nothing of another client.

    Attributes:
        broadcast: What the server sent; it names the client and the round.
        personal: The client's personal state, as it was stored.
        data: The client's own training data.
    """

    broadcast: Broadcast
    personal: State
    data: FitData

    @property
    def client(self) -> int:
        """Number of the client."""
        return self.broadcast.client

    @property
    def round(self) -> int:
        """Number of the round, from 0."""
        return self.broadcast.round


@dataclass(frozen=True)
class FitResult:
    """What came of a :class:`FitTask`.

    Attributes:
        client: Number of the client.
        round: Number of the round.
        update: The upload; ``None`` when the fit failed.
        personal: The personal state after the fit; empty when the fit failed.
        losses: Means over the steps of a phase, averaged over the phases that have the term, by name.
        seconds: Wall time of the fit.
        error: Why the fit failed.
        logged: What the module itself logged, apart from the terms of the loss, by name.
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


@dataclass(frozen=True)
class EvaluationTask:
    """One client's own model and the parts that it is judged on.

    Attributes:
        broadcast: What the server would send now; it names the client and the round.
        stored: The client's stored state.
        trained: Whether the stored state is the whole model as the last local fit left it, which is then evaluated;
            otherwise the model is the personal state under the broadcast.
        data: The client's own training data, for a fine-tuning before the evaluation.
        validation: The validation part; ``None`` leaves it out, as it does an empty one.
        test: The test part, likewise.
    """

    broadcast: Broadcast
    stored: State
    trained: bool
    data: FitData
    validation: SplitSource | None = None
    test: SplitSource | None = None

    @property
    def client(self) -> int:
        """Number of the client."""
        return self.broadcast.client

    @property
    def round(self) -> int:
        """Number of the round, from 0."""
        return self.broadcast.round


@dataclass(frozen=True)
class EvaluationResult:
    """What came of an :class:`EvaluationTask`.

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
