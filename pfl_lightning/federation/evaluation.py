"""Evaluation of clients by their own models, each on its own data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pfl_lightning.client import FederatedClient
from pfl_lightning.engines import Engine, EvaluationResult, EvaluationTask, FitEnvironment
from pfl_lightning.engines.notices import named_clients
from pfl_lightning.errors import ClientError, FederationError
from pfl_lightning.metrics import EvalMetrics, summarize

__all__ = ["Evaluation", "Scores", "summarize_scores", "warn_if_not_finetuned"]

Scores = Mapping[int, EvalMetrics]
"""Metrics of each client, by its number."""

Summarize = Callable[[str, Scores], dict[str, float]]
"""Gives metrics over clients by name, from a prefix of the names and the metrics of each client."""


@dataclass
class Evaluation:
    """One evaluation of clients, one after the other.

    Attributes:
        round: Last round that was trained.
        validation_scores: Metrics on the validation parts, of the clients so far.
        test_scores: Metrics on the test parts, likewise.
        finetune_failures: Clients that were evaluated without the fine-tuning of their method, which failed.
        summary: Metrics over clients, by the name under which they are logged; set by :meth:`close`.
        left: Clients that are still to be evaluated.
        is_closed: Whether the scores were summarized.
    """

    round: int = 0
    validation_scores: dict[int, EvalMetrics] = field(default_factory=dict)
    test_scores: dict[int, EvalMetrics] = field(default_factory=dict)
    finetune_failures: list[int] = field(default_factory=list)
    summary: dict[str, float] = field(default_factory=dict)
    left: int = 0
    is_closed: bool = False
    _results: Iterator[EvaluationResult] = field(default_factory=lambda: iter(()), repr=False)

    def start(
        self, tasks: Iterable[tuple[FederatedClient, EvaluationTask]], engine: Engine, environment: FitEnvironment
    ) -> None:
        """Hand the clients to the engine."""
        self._results = engine.evaluate(tasks, environment)

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
                "leave the order of the data module's loaders as it is"
            )
        self.left -= 1
        if result.finetune_failures is not None:
            warn_if_not_finetuned(result.finetune_failures)
            self.finetune_failures.append(client)
        if result.validation is not None:
            self.validation_scores[client] = result.validation
        if result.test is not None:
            self.test_scores[client] = result.test

    def stop(self) -> None:
        """Drop the evaluations under way; the scores so far stay."""
        self._results = iter(())

    def close(self, novel: Iterable[int], summarize: Summarize) -> None:
        """Summarize the scores: ``val_accuracy/*`` of the validation parts, ``test_accuracy/*`` of the test parts.

        Args:
            novel: Clients that never train; they are summarized apart, as ``novel_val_accuracy/*`` and so on.
            summarize: Gives the metrics of some clients.
        """
        self.is_closed, apart = True, set(novel)
        for part, scores in (("val_", self.validation_scores), ("test_", self.test_scores)):
            trained = {client: score for client, score in scores.items() if client not in apart}
            others = {client: score for client, score in scores.items() if client in apart}
            for prefix, group in ((part, trained), (f"novel_{part}", others)):
                if group:
                    self.summary |= summarize(prefix, group)


def summarize_scores(prefix: str, scores: Scores, *, has_loss: bool = True) -> dict[str, float]:
    """Return statistics of the accuracy over clients, and the mean loss, by name.

    Args:
        prefix: First part of the names, such as ``"novel_test_"``.
        scores: Metrics of each client; at least one.
        has_loss: Whether models have a loss; without one it is left out where it is NaN.
    """
    summary = summarize(list(scores), [score.accuracy for score in scores.values()])
    values = {f"{prefix}accuracy/{name}": float(value) for name, value in summary.as_dict().items()}
    losses = {client: score.loss for client, score in scores.items() if not math.isnan(score.loss)}
    loss = sum(losses.values()) / len(losses) if losses else math.nan
    lost = sorted(scores.keys() - losses.keys())
    if has_loss and lost and losses:
        warnings.warn(
            f"the loss of {named_clients(lost)} is NaN, and {prefix}loss/mean is that of the other clients: look for "
            "NaN in the inputs, or for weights that have become infinite",
            stacklevel=2,
        )
    if has_loss or not math.isnan(loss):
        values[f"{prefix}loss/mean"] = loss
    return values


def warn_if_not_finetuned(error: ClientError | None) -> None:
    """Warn that a client was evaluated without the fine-tuning of its method."""
    if error is not None:
        warnings.warn(f"evaluated without fine-tuning: {error}", stacklevel=3)
