"""Notices training that diverges, and says what to try."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pfl_lightning.state.image import Growth

if TYPE_CHECKING:
    from pfl_lightning.federation.federation import Federation

LOSS = "train/loss"

MAX_GROWTH = 100.0
"""Factor by which the server's weights may grow in a round."""

EVALUATED_LOSS = 100.0
"""Multiple of the loss of guessing, or of one, beyond which the mean loss of an evaluation explodes."""

LOSS_GROWTH = 10.0
"""Multiple of the first round's mean loss, or of one, beyond which the loss explodes."""

NOISE = 2.0
"""Standard errors of the difference of two accuracies up to which a fall is the chance of few samples."""

ALTHOUGH = ", although the mean training loss has fallen from "
"""What is said of a fall that is no divergence."""

PATIENCE = 3
"""Evaluated rounds in a row after which an accuracy at chance is more than a bad round."""


class DivergenceGuard:
    """Watches the mean loss, the server's weights and the mean accuracy, and warns once.

    It warns of a mean loss of more than ten times that of the first round; of a cross entropy of more than ten times
    that of guessing, or a hundred times in an evaluation; of weights on the server that grow by a factor of more than a
    hundred in a round; and of an accuracy that was better than that of guessing and falls to it for three evaluated
    rounds in a row, by more than the chance of so few samples. A first loss, or one of guessing, below 1 counts as 1.
    Where the accuracy alone falls, and the training loss does too, it is not said to diverge.

    Attributes:
        limits: Largest values of a round's metrics, by name, up to which nothing need be looked at.
        stopped: Rounds after which a run was ended for it; 0 where none was.
    """

    def __init__(self) -> None:
        self.limits = {LOSS: -math.inf}  # so that the first round is looked at
        self.best, self.at_chance, self.reported = 0.0, 0, False
        self.loss_at_best: float | None = None
        self.stopped = 0

    def exceeded(self, metrics: Mapping[str, float], growth: Growth, federation: Federation) -> str | None:
        """Return what diverges in a round whose metrics exceed a limit, or whose weights have grown.

        Args:
            metrics: Metrics of the round, by name.
            growth: How the server's numbers have changed.
            federation: The federation.
        """
        if math.isinf(self.limits[LOSS]):
            self.limits = {LOSS: LOSS_GROWTH * max(abs(metrics.get(LOSS, 1.0)), 1.0)}
            model: Any = federation.models[0]
            if model.step_module is model:  # a loss of the package, and not of a user's module
                guessing = max(math.log(model.num_classes), 1.0)
                terms = [name for name in model.loss_names if name.endswith("cross_entropy")]
                self.limits |= {f"train/{name}": LOSS_GROWTH * guessing for name in terms}
        for name, limit in self.limits.items():
            value = metrics.get(name, 0.0)
            if value > limit:
                whose = "that of the first round was" if name == LOSS else "guessing has"
                return f"the mean of {name} is {value:.3g}, and {whose} {limit / LOSS_GROWTH:.3g}, or less"
        if growth.factor > MAX_GROWTH:
            return f"{growth.name} on the server has grown by a factor of {growth.factor:.3g} in this round"
        return None

    def falls(self, summary: Mapping[str, float], federation: Federation, trained: float = math.nan) -> str | None:
        """Return what diverges, by the mean loss and the mean accuracy of an evaluation.

        Args:
            summary: Metrics over clients, by name.
            federation: The federation.
            trained: Mean training loss of the round that is evaluated; NaN where no client has one.
        """
        model: Any = federation.models[0]
        if model.num_classes < 2:  # a user's module without classes
            return None
        guessing, chance = max(math.log(model.num_classes), 1.0), 1 / model.num_classes
        loss = max(summary.get("val_loss/mean", 0.0), summary.get("test_loss/mean", 0.0))
        if loss > EVALUATED_LOSS * guessing and model.step_module is model:
            return f"the mean loss of the evaluated models is {loss:.3g}, and guessing reaches {guessing:.3g}, or less"
        accuracy = summary.get("val_accuracy/mean", summary.get("test_accuracy/mean", math.nan))
        if math.isfinite(accuracy) and accuracy >= self.best:
            self.best, self.loss_at_best = accuracy, trained if math.isfinite(trained) else None
        learned = self.best >= chance + 0.1 * (1 - chance)
        lost = learned and accuracy <= chance + 0.1 * (self.best - chance)
        self.at_chance = self.at_chance + 1 if lost else 0
        if self.at_chance < PATIENCE:
            return None
        self.at_chance = 0
        scores = federation.evaluation.validation_scores or federation.evaluation.test_scores
        samples = sum(score.num_samples for score in scores.values())
        if self.best - accuracy <= NOISE * math.sqrt(2 * 0.25 / max(samples, 1)):
            return None
        fallen = f"the mean accuracy is {accuracy:.3g}, as by guessing, for {PATIENCE} rounds; it was {self.best:.3g}"
        if self.loss_at_best is not None and trained < self.loss_at_best:
            return f"{fallen}{ALTHOUGH}{self.loss_at_best:.3g} to {trained:.3g} since"
        return fallen

    def report(self, what: str, round: int, federation: Federation) -> None:
        """Warn, once in a run, with what to try."""
        if not self.reported:
            self.reported = True
            tries = "; ".join(remedies(federation))
            said = what if ALTHOUGH in what else f"the training diverges: {what}"
            warnings.warn(
                f"round {round + 1}: {said}. Try {tries}. FederatedLoop(stop_on_divergence=True) ends such runs",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {**vars(self), "limits": dict(self.limits)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        vars(self).update(state, limits=dict(state["limits"]))


def remedies(federation: Federation) -> list[str]:
    """What to try when the training diverges, the most likely cause first."""
    model: Any = federation.models[0]
    paper, used = model.paper_batch_size, federation.data.batch_size
    lies = federation.lying and federation.robust is None
    found = ["a robust rule (--model.robust), as some clients send false updates"] if lies else []
    if paper is not None and used < paper:
        found.append(
            f"batch_size {paper}, as in the paper: with batches of {used} a round takes up to {paper / used:.3g} times "
            "as many steps"
        )
    found += model.remedies()
    lr = getattr(model, "lr", None)
    found.append("a smaller lr" if lr is None or model.step_module is not model else f"an lr below {lr:g}")
    if federation.engine.gradient_clip_val is None:
        found.append("gradient_clip_val=1.0 of the engine")
    return found
