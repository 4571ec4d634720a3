"""Tasks of an engine, and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from pfl_lightning.class_metrics import ClassMetric
from pfl_lightning.data import SplitSource
from pfl_lightning.errors import ClientError, FederationError
from pfl_lightning.fit.context import FitContext, RunFacts
from pfl_lightning.fit.data import FitData
from pfl_lightning.functional.tensor_lists import copied
from pfl_lightning.messages import Broadcast, ClientUpdate, State
from pfl_lightning.metrics import EvalMetrics

Losses = dict[str, float]
"""Means over the steps of a fit, by the name of the loss term."""

MakeTrainer = Callable[..., L.Trainer | None]
"""Makes an inner Trainer from callbacks and options of ``L.Trainer``; gives ``None`` where an engine has none."""


@dataclass(frozen=True)
class Clock:
    """How far the outer Trainer has come, for a user's module that asks its Trainer in an evaluation.

    Attributes:
        epoch: Its ``current_epoch``: the round, from 0; after a fit the number of rounds.
        step: Its ``global_step``: rounds that have ended.
        max_epochs: Its ``max_epochs``: planned rounds.
    """

    epoch: int = 0
    step: int = 0
    max_epochs: int | None = None


@dataclass(frozen=True)
class FitEnvironment:
    """Settings of the outer Trainer and of the run that every local fit gets.

    Attributes:
        seed: The run's seed.
        device: Where clients train.
        precision: Lightning's precision plugin: it has the context of every forward pass, and converts inputs. By
            default clients train in their module's own precision.
        precision_name: Precision of an inner Trainer, such as ``"bf16-mixed"``.
        facts: Facts about the run that local fits may ask for.
        clock: How far the outer Trainer has come.
        metrics: What class scores are judged by in an evaluation, beside accuracy and loss, by name.
        confusion: Whether an evaluation gives confusion matrices, too.
    """

    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision = field(default_factory=Precision)
    precision_name: str = "32-true"
    facts: RunFacts = field(default_factory=RunFacts)
    clock: Clock = field(default_factory=Clock)
    metrics: Mapping[str, ClassMetric] = field(default_factory=dict)
    confusion: bool = False


@dataclass(frozen=True)
class FitTask:
    """One client's fit in one round: everything it needs, and nothing of another client.

    Attributes:
        context: Client, round and training data.
        broadcast: Message of the server.
        personal: The client's personal state, as it was stored.
        resume_state: What the client's last local fit has handed on, empty before its first; ``None`` where nothing is.
    """

    context: FitContext
    broadcast: Broadcast
    personal: State
    resume_state: bytes | None = None


@dataclass(frozen=True)
class PhaseResult:
    """Outcome of one phase of a local fit.

    Attributes:
        losses: Means over the steps, by the name of the loss term.
        num_steps: Number of optimizer steps taken, see :class:`~pfl_lightning.client.FitContext`.
        is_cut: Whether ``max_steps`` of the context has ended the phase, with batches left.
    """

    losses: Losses
    num_steps: int
    is_cut: bool = False


@dataclass(frozen=True)
class FitResult:
    """Result of a :class:`FitTask`.

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
        resume_state: What the fit hands on to the client's next, if anything.
        progress_bar_names: Names of the logged values that the progress bar shows.
        reductions: ``"sum"``, ``"min"`` or ``"max"`` by the names of logged values that are no means.
        num_steps: Local steps that the fit took.
        is_cut: Whether ``max_steps`` of the context has ended it, with batches left.
    """

    client: int
    round: int
    update: ClientUpdate | None
    personal: State
    losses: Losses
    seconds: float
    error: FederationError | None = None
    logged: Losses = field(default_factory=dict)
    num_samples: int = 0
    resume_state: bytes | None = None
    progress_bar_names: frozenset[str] = frozenset()
    reductions: Mapping[str, str] = field(default_factory=dict)
    num_steps: int = 0
    is_cut: bool = False

    @staticmethod
    def failed(context: FitContext, seconds: float, error: FederationError) -> FitResult:
        """Return the result of a fit that failed with an error."""
        return FitResult(context.client, context.round, None, {}, {}, seconds, error)

    def with_own_state(self) -> FitResult:
        """Return the result with copies of its tensors, which stay valid when the next client is fitted."""
        update = self.update.with_tensors(Tensor.clone) if isinstance(self.update, ClientUpdate) else self.update
        own = dict(zip(self.personal, copied(list(self.personal.values())), strict=True))
        return replace(self, update=update, personal=own)


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
        test: The test part; ``None`` to leave it out.
        attributes: What the client's last local fit has left in plain attributes of a user's module.
    """

    context: FitContext
    broadcast: Broadcast
    stored: State
    trained: bool
    validation: SplitSource | None = None
    test: SplitSource | None = None
    attributes: bytes = b""


@dataclass(frozen=True)
class ScoringTask:
    """One part of a client's data, on which the model that its module holds is evaluated.

    Attributes:
        part: The samples; at least one.
        stage: ``"validation"`` or ``"test"``.
        data: The client's training data and settings.
        environment: Settings of the outer Trainer and of the run.
        make_trainer: Makes an inner Trainer; gives ``None`` where an engine has none.
    """

    part: SplitSource
    stage: str
    data: FitData
    environment: FitEnvironment
    make_trainer: MakeTrainer


@dataclass(frozen=True)
class EvaluationResult:
    """Result of an :class:`EvaluationTask`.

    Attributes:
        client: Number of the client.
        validation: Of the validation part, if it was asked for and is not empty.
        test: Of the test part; ``None`` without one.
        finetune_failures: Why the client was evaluated without the fine-tuning that its method has.
    """

    client: int
    validation: EvalMetrics | None = None
    test: EvalMetrics | None = None
    finetune_failures: ClientError | None = None
