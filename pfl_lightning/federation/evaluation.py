"""Evaluation of clients by their own models, each on its own data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.class_metrics import ClassMetric
from pfl_lightning.data import names_of
from pfl_lightning.engines import EvaluationResult
from pfl_lightning.errors import ClientError, FederationError
from pfl_lightning.lightning_private import put_values, set_batches_that_stepped
from pfl_lightning.metrics import EvalMetrics, over_clients, summarize
from pfl_lightning.notices import Names, named_clients

if TYPE_CHECKING:
    from pfl_lightning.federation.federation import Federation

ACCURACIES = ("val_accuracy", "novel_val_accuracy", "test_accuracy", "novel_test_accuracy")
"""Short names of means in a fit, unless a user's module logs them itself."""

Scores = Mapping[int, EvalMetrics]
"""Metrics of each client, by its number."""


@dataclass
class Evaluation:
    """One evaluation of clients, one after the other.

    Attributes:
        round: Last round that was trained.
        validation_scores: Metrics on the validation parts, of the clients so far.
        test_scores: Metrics on the test parts, in the same order.
        finetune_failures: Clients that were evaluated without the fine-tuning of their method, which failed.
        liars: Metrics of clients that lie for an experiment, by part: no figure is of them.
        summary: Metrics over clients, by the name under which they are logged; set by :meth:`close`.
        left: Clients that are still to be evaluated.
        is_closed: Whether the scores were summarized.
        names: Names of the clients.
        lying: The clients that lie.
    """

    round: int = 0
    validation_scores: dict[int, EvalMetrics] = field(default_factory=dict)
    test_scores: dict[int, EvalMetrics] = field(default_factory=dict)
    finetune_failures: list[int] = field(default_factory=list)
    liars: dict[str, dict[int, EvalMetrics]] = field(default_factory=lambda: {"val": {}, "test": {}})
    summary: dict[str, float] = field(default_factory=dict)
    left: int = 0
    is_closed: bool = False
    names: tuple[str, ...] = ()
    lying: frozenset[int] = frozenset()
    _results: Iterator[EvaluationResult] = field(default_factory=lambda: iter(()), repr=False)

    @classmethod
    def begin(
        cls, federation: Federation, limits: Sequence[int | float], *, validation: bool, test: bool
    ) -> Evaluation:
        """Hand the clients to the engine.

        Args:
            federation: The federation.
            limits: The outer Trainer's limits of batches, which are clients, for each of its loaders.
            validation: Whether clients are evaluated on their validation parts.
            test: Whether they are evaluated on their test parts.
        """
        clients, stage = federation.data.evaluated_clients()[: int(limits[0])], federation._stage
        tasks = ((client, federation.evaluation_task(client, validation=validation, test=test)) for client in clients)
        prepared = (
            (federation.clients.model_of(client), task) if stage is None else stage.prepare(client, task)
            for client, task in tasks
        )
        results = federation.engine.evaluate(prepared, federation.environment)
        names, lying = names_of(federation.data), federation.lying
        return cls(federation.round, left=len(clients), names=names, lying=lying, _results=results)

    def evaluate_next(self, client: int) -> None:
        """Evaluate the next client.

        Args:
            client: The client that the outer Trainer expects.

        Raises:
            FederationError: Another client is next, or all have been evaluated.
        """
        result = next(self._results, None)
        if result is None or result.client != client:
            found = "all have been evaluated" if result is None else f"client {result.client} is next"
            raise FederationError(
                f"the outer Trainer asks for the evaluation of client {client}, and {found}; "
                "do not change the order of the data module's loaders"
            )
        self.left -= 1
        if warn_if_not_finetuned(result.finetune_failures, self.names):
            self.finetune_failures.append(client)
        lies = client in self.lying
        if result.validation is not None:
            (self.liars["val"] if lies else self.validation_scores)[client] = result.validation
        if result.test is not None:
            (self.liars["test"] if lies else self.test_scores)[client] = result.test

    def stop(self) -> None:
        """Drop the evaluations under way; the scores so far stay."""
        self._results = iter(())

    def close(self, federation: Federation) -> None:
        """Summarize the scores, and log them; outside of a fit to the loggers, too.

        ``val_accuracy/*`` is of the validation parts, ``test_accuracy/*`` of the test parts; clients that never train
        are summarized apart, as ``novel_val_accuracy/*`` and so on. During a fit the loop logs the summary against the
        round; Lightning would count local fits.
        """
        self.is_closed, apart = True, set(federation.data.novel)
        for part, scores in (("val_", self.validation_scores), ("test_", self.test_scores)):
            trained = {client: score for client, score in scores.items() if client not in apart}
            others = {client: score for client, score in scores.items() if client in apart}
            for prefix, group in ((part, trained), (f"novel_{part}", others)):
                if group:
                    self.summary |= federation.summary_of(prefix, group)
        every = (*self.validation_scores.values(), *self.test_scores.values())
        in_bar = {name for score in every for name in score.progress_bar_names}
        if federation.trainer.state.fn == TrainerFn.FITTING:
            short = {name: self.summary[f"{name}/mean"] for name in ACCURACIES if f"{name}/mean" in self.summary}
            put_values(federation.trainer, short | self.summary, in_bar | (short.keys() - self.summary.keys()))
            return
        if federation.has_trained:  # Lightning logs against this, which it does not know of a loaded model
            set_batches_that_stepped(federation.trainer, federation.round)
        for name, value in self.summary.items():  # names may have the number of a loader already
            federation.log(name, value, name in in_bar, batch_size=1, add_dataloader_idx=False)


def summarize_scores(
    prefix: str,
    scores: Scores,
    metrics: Mapping[str, ClassMetric] | None = None,
    *,
    has_loss: bool = True,
    names: Names = None,
) -> dict[str, float]:
    """Return statistics of accuracy and further metrics over clients, and the mean loss, by name.

    Args:
        prefix: First part of the names, such as ``"novel_test_"``.
        scores: Metrics of each client; at least one.
        metrics: The further metrics that the scores may have, by name.
        has_loss: Whether models have a loss; without one it is left out where it is NaN.
        names: Names of the clients.
    """
    samples = {client: score.num_samples for client, score in scores.items()}
    values = named_summary(f"{prefix}accuracy", {client: score.accuracy for client, score in scores.items()}, samples)
    for name, metric in (metrics or {}).items():
        own = {client: score.further[name] for client, score in scores.items() if name in score.further}
        if own:
            left_out = over_clients(
                f"{prefix}{name}", own, samples, names=names
            )  # which says for whom it is not defined
            known = {client: value for client, value in own.items() if not math.isnan(value)}
            values |= named_summary(f"{prefix}{name}", known, samples, metric.lower_is_better)
            values |= {key: number for key, number in left_out.items() if key.endswith("/clients")}
    losses = {client: score.loss for client, score in scores.items() if not math.isnan(score.loss)}
    loss = sum(losses.values()) / len(losses) if losses else math.nan
    lost = sorted(scores.keys() - losses.keys())
    if has_loss and lost and losses:
        warnings.warn(
            f"the loss of {named_clients(lost, names)} is NaN, and {prefix}loss/mean is that of the other clients: "
            "look for NaN in the inputs, or for weights that have become infinite",
            stacklevel=2,
        )
    if has_loss or not math.isnan(loss):
        values[f"{prefix}loss/mean"] = loss
    return values


def named_summary(
    name: str, values: Mapping[int, float], samples: Mapping[int, int], lower_is_better: bool = False
) -> dict[str, float]:
    """The summary of a metric over clients as values to be logged, such as ``val_f1/mean``; empty without clients."""
    summary = summarize(values, samples, lower_is_better).as_dict() if values else {}
    return {f"{name}/{statistic}": float(value) for statistic, value in summary.items()}


def warn_if_not_finetuned(error: ClientError | None, names: Names) -> bool:
    """Return whether a client was evaluated without the fine-tuning of its method, after a warning that says why."""
    if error is not None:
        warnings.warn(f"evaluated without fine-tuning: {error.told(names)}", stacklevel=3)
    return error is not None
