"""Validation and test of a federation: every client with its own model on its own parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from pfl_lightning.federation.client_models import ClientModels
from pfl_lightning.federation.engine_hooks import EngineHooks
from pfl_lightning.federation.evaluation import Evaluation, Scores, summarize_scores
from pfl_lightning.lightning_private import set_batches_that_stepped
from pfl_lightning.metrics import EvalMetrics

__all__ = ["EvaluationHooks"]


class EvaluationHooks(EngineHooks, ClientModels):
    """Steps and hooks of the outer Trainer's validation and test: one batch is one client."""

    tests_in_fits: ClassVar[bool] = True
    """Whether clients' test parts are evaluated beside their validation parts during a fit."""

    def on_validation_epoch_start(self) -> None:
        """Hand the clients to the engine; during a fit their test parts may be evaluated, too."""
        sanity = self.trainer.sanity_checking
        limits = self.trainer.num_sanity_val_batches if sanity else self.trainer.num_val_batches
        test = self.tests_in_fits and self.trainer.state.fn == TrainerFn.FITTING
        self._begin_evaluation(limits, validation=True, test=test)

    def on_test_epoch_start(self) -> None:
        """Hand the clients to the engine."""
        self._begin_evaluation(self.trainer.num_test_batches, validation=False, test=True)

    def _begin_evaluation(self, limits: Sequence[int | float], *, validation: bool, test: bool) -> None:
        clients, stage = self.data.evaluated_clients()[: int(limits[0])], self._stage
        tasks = ((client, self.evaluation_task(client, validation=validation, test=test)) for client in clients)
        prepared = (
            (self.clients.model_of(client), task) if stage is None else stage.prepare(client, task)
            for client, task in tasks
        )
        self.evaluation = Evaluation(self.round, left=len(clients))
        self.evaluation.start(prepared, self.engine, self.environment)

    # Evaluation under inference_mode would forbid the fine-tuning of a client's model, and would leave tensors behind
    # that no later fit could use.
    @torch.inference_mode(False)
    @torch.no_grad()
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Evaluate each client of the batch with its own model on its own parts."""
        try:
            for client in batch.tolist():
                self.evaluation.evaluate_next(client)
        except BaseException:
            self.stop_engine()  # Lightning calls no teardown after an error, and there may be no loop
            raise
        if not self.evaluation.left:  # here, so that callbacks find the values in their on_validation_epoch_end
            self.on_validation_epoch_end()

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Log ``val_accuracy/*`` of the validation parts and ``test_accuracy/*`` of the test parts."""
        if self.evaluation.is_closed:
            return
        self.evaluation.close(self.data.novel, self.summary_of)
        summary = self.evaluation.summary
        # During a fit the loop logs them against the round; Lightning would count local fits.
        outside = self.trainer.state.fn != TrainerFn.FITTING
        if outside and self.has_trained:  # Lightning logs against this, which it does not know of a loaded model
            set_batches_that_stepped(self.trainer, self.round)
        scores = (*self.evaluation.validation_scores.values(), *self.evaluation.test_scores.values())
        shown = {name for score in scores for name in score.shown}
        to = None if outside else False  # of True Lightning would warn where there is no logger
        for name, value in summary.items():  # names may have the number of a loader already
            self.log(name, value, name in shown, logger=to, batch_size=1, add_dataloader_idx=False)
        for prefix in () if outside else ("val_", "novel_val_", "test_", "novel_test_"):
            mean = summary.get(f"{prefix}accuracy/mean")
            if mean is not None and f"{prefix}accuracy" not in summary:  # which a user's module may log itself
                self.log(f"{prefix}accuracy", mean, logger=False, prog_bar=True, batch_size=1)

    on_test_epoch_end = on_validation_epoch_end

    def summary_of(self, prefix: str, scores: Scores) -> dict[str, float]:
        """Return metrics over clients by name; see :func:`~pfl_lightning.federation.evaluation.summarize_scores`."""
        return summarize_scores(prefix, scores, has_loss=self.clients.models[0].evaluation != "knn")

    @property
    def validation_scores(self) -> dict[int, EvalMetrics]:
        """Metrics of each client on its validation part in the last evaluation."""
        return self.evaluation.validation_scores

    @property
    def test_scores(self) -> dict[int, EvalMetrics]:
        """Metrics of each client on its test part in the last evaluation."""
        return self.evaluation.test_scores

    @property
    def finetune_failures(self) -> list[int]:
        """Clients that the last evaluation took without the fine-tuning of their method, which failed."""
        return self.evaluation.finetune_failures
