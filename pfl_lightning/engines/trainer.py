"""An engine with every hook of Lightning: an inner, silent Trainer for each phase."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor

from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.drop_in.client import ModuleClient
from pfl_lightning.drop_in.module_evaluation import StepsTask
from pfl_lightning.drop_in.module_trainer import (
    ScoresCallback,
    evaluate_under_trainer,
    fit_under_trainer,
    loader_for_trainer,
    logged_values,
    module_in_fit,
    module_under_trainer,
    numbers,
)
from pfl_lightning.engines.base import Engine, check_finite_losses, means
from pfl_lightning.engines.tasks import FitEnvironment, Losses
from pfl_lightning.errors import NonFiniteLossError
from pfl_lightning.seeding import seeded_generator

__all__ = ["TrainerEngine"]

FOR_MODULES = {"logger": DummyLogger()}
"""Of an inner Trainer of somebody's own module, whose code may send to ``self.logger``: it goes nowhere."""


class TrainerEngine(Engine):
    """Trains each client by a Lightning Trainer of its own, silent and without logger or checkpoints.

    Slower than :class:`~pfl_lightning.engines.SequentialEngine`, with every hook, manual optimization, several
    optimizers, gradient accumulation, and the user's own callbacks.

    Args:
        gradient_clip_val: See :class:`~pfl_lightning.engines.Engine`.
        gradient_clip_algorithm: See :class:`~pfl_lightning.engines.Engine`.
        accumulate_grad_batches: As the Trainer's.
        callbacks: Callbacks of the inner Trainer; each phase of a local fit gets fresh copies.
    """

    def __init__(
        self,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        accumulate_grad_batches: int = 1,
        callbacks: list[L.Callback] | None = None,
    ) -> None:
        super().__init__(gradient_clip_val, gradient_clip_algorithm)
        self.accumulate_grad_batches = accumulate_grad_batches
        self.callbacks = callbacks or []

    def run_phase(
        self, client: FederatedClient, phase: Phase, context: FitContext, environment: FitEnvironment, purpose: str
    ) -> Losses:
        """Train through one phase; see :meth:`Engine.run_phase`."""
        generator = seeded_generator(environment.seed, purpose, context.round, context.client)
        watch = _LossWatch(context, phase)
        if isinstance(client, ModuleClient):
            return self._run_module_phase(client, phase, context, environment, generator, watch)
        with _silence():
            trainer = self._make_trainer(phase, environment, [*copy.deepcopy(self.callbacks), watch])
            try:
                trainer.fit(client, train_dataloaders=context.data.loader(generator))
            finally:
                client.trainer = None
                client.to(environment.device)  # the inner Trainer's teardown moves its module to the CPU
                client.train()
        if watch.error is not None:
            raise watch.error
        return means(watch.steps) | {
            name: float(value) for name, value in trainer.callback_metrics.items() if name not in watch.steps
        }

    def _run_module_phase(
        self,
        client: ModuleClient,
        phase: Phase,
        context: FitContext,
        environment: FitEnvironment,
        generator: torch.Generator,
        watch: _LossWatch,
    ) -> Losses:
        """Train somebody's own module: it is the inner Trainer's, as it would be without a federation."""
        loader = loader_for_trainer(context, generator)
        with _silence(), module_in_fit(client) as (record, own):
            callbacks = [*copy.deepcopy(self.callbacks), *own, watch]
            trainer = self._make_trainer(phase, environment, callbacks, **FOR_MODULES)
            fit_under_trainer(trainer, client.step_module, loader, context.data.datamodule)
            client.keep_logged(logged_values(trainer, record))
        client.to(environment.device)
        if watch.error is not None:
            raise watch.error
        return means(watch.steps)

    def run_module_steps(self, task: StepsTask) -> dict[str, float]:
        """Run the validation or test steps of somebody's own module under an inner Trainer."""
        with _silence(), module_under_trainer(task.client.module):
            callback = ScoresCallback(task.scores, task.environment)
            trainer = self._make_trainer(Phase(), task.environment, [callback], **FOR_MODULES, limit_val_batches=1.0)
            evaluate_under_trainer(trainer, task)
        task.client.to(task.environment.device)
        task.client.eval()
        return numbers(trainer.callback_metrics)

    def _make_trainer(
        self,
        phase: Phase,
        environment: FitEnvironment,
        callbacks: Sequence[L.Callback],
        **options: Any,
    ) -> L.Trainer:
        if self.gradient_clip_val is not None:
            options["gradient_clip_val"] = self.gradient_clip_val
            options["gradient_clip_algorithm"] = self.gradient_clip_algorithm
        device = environment.device
        return L.Trainer(
            accelerator="cpu" if device.type == "cpu" else device.type,
            devices=1 if device.type == "cpu" else [device.index or 0],
            precision=environment.precision_name,  # type: ignore[arg-type]
            max_epochs=phase.epochs,
            callbacks=list(callbacks),
            accumulate_grad_batches=self.accumulate_grad_batches,
            barebones=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            inference_mode=False,  # whose tensors could not train
            **{"logger": False, "limit_val_batches": 0, **options},
        )


class _LossWatch(L.Callback):
    """Collects the loss terms of every step and stops at the end of an epoch with a non-finite loss."""

    def __init__(self, context: FitContext, phase: Phase) -> None:
        self.context, self.phase = context, phase
        self.steps: dict[str, list[Tensor]] = {}
        self.error: NonFiniteLossError | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        terms = outputs if isinstance(outputs, dict) else {} if outputs is None else {"loss": outputs}
        for name, value in terms.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                # Lightning divides the loss by the number of batches whose gradients are accumulated.
                scale = trainer.accumulate_grad_batches if name == "loss" else 1
                self.steps.setdefault(name, []).append(value.detach() * scale)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        try:
            check_finite_losses(self.steps.get("loss", []), self.context, self.phase)
        except NonFiniteLossError as error:
            self.error = error  # an exception inside the inner Trainer would tear down more than this fit
            trainer.should_stop = True


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the inner Trainers' notices out of the terminal; errors come through."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
