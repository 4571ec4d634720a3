"""An engine with every hook of Lightning: an inner, silent Trainer for each phase."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.data import FederatedData
from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.lifecycle import check_finite_losses, means_of
from pfl_lightning.engines.schedules import StepCount, advance
from pfl_lightning.engines.sequential import new_scaler
from pfl_lightning.errors import ConfigurationError, NonFiniteLossError
from pfl_lightning.fit.tasks import FitEnvironment, PhaseResult
from pfl_lightning.lightning_private import keep_fewer_signals, silent_trainer
from pfl_lightning.notices import silence
from pfl_lightning.seeding import seeded_generator


class TrainerEngine(Engine):
    """Engine that trains each client with its own Lightning Trainer, without logger or checkpoints.

    Slower than :class:`~pfl_lightning.engines.SequentialEngine`, with every hook, manual optimization, several
    optimizers, gradient accumulation, and the user's own callbacks.

    Args:
        gradient_clip_val: See :class:`~pfl_lightning.engines.Engine`.
        gradient_clip_algorithm: See :class:`~pfl_lightning.engines.Engine`.
        accumulate_grad_batches: As the Trainer's.
        callbacks: Callbacks of the inner Trainer; each phase of a local fit gets fresh copies.
        limit_train_batches: Batches of each client in a local epoch, as the Trainer's: a number or a share.
        limit_val_batches: Batches of each client's validation part that a module given to ``federate`` is shown.
        limit_test_batches: The same of test parts.
        max_steps: Optimizer steps of each phase of a local fit, which also ends after its epochs.
        threads: See :class:`~pfl_lightning.engines.Engine`.
    """

    gives_trainer = True

    def __init__(
        self,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        accumulate_grad_batches: int = 1,
        callbacks: list[L.Callback] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        max_steps: int = -1,
        threads: int | None = None,
    ) -> None:
        super().__init__(gradient_clip_val, gradient_clip_algorithm, threads)
        if max_steps != -1:
            check_at_least("max_steps", max_steps, 1)
        check_at_least("accumulate_grad_batches", accumulate_grad_batches, 1)
        limits = {"train": limit_train_batches, "val": limit_val_batches, "test": limit_test_batches}
        for part, limit in limits.items():
            check_number(f"limit_{part}_batches", limit, optional=True)
        self.accumulate_grad_batches = accumulate_grad_batches
        self.callbacks = callbacks or []
        self.limit_train_batches, self.limit_val_batches = limit_train_batches, limit_val_batches
        self.limit_test_batches = limit_test_batches
        self.max_steps = max_steps
        # Trainers as they were made: a new one takes 30 ms, most of it a search for other packages.
        self._copiers: dict[tuple[Any, ...], Callable[[], Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """State without the Trainers, which a worker makes itself."""
        return {**self.__dict__, "_copiers": {}}

    def start(self, models: Sequence[FederatedClient], data: FederatedData, environment: FitEnvironment) -> None:
        """Refuse limits that would have no effect; see :meth:`Engine.start`.

        Raises:
            ConfigurationError: Batches of an evaluation are limited that no Trainer runs.
        """
        limited = self.limit_val_batches is not None or self.limit_test_batches is not None
        own = (model for model in models if model.user_module is None)
        if limited and any(type(model).evaluate is FederatedClient.evaluate for model in own):
            raise ConfigurationError(
                "TrainerEngine's limit_val_batches and limit_test_batches are for modules given to federate: leave "
                "them out. Here clients are evaluated on all their samples; eval_cohort of FederatedLoop says how many"
            )
        self._copiers.clear()
        super().start(models, data, environment)

    def run_phase(
        self, client: FederatedClient, phase: Phase, context: FitContext, environment: FitEnvironment, purpose: str
    ) -> PhaseResult:
        """Train through one phase; see :meth:`Engine.run_phase`."""
        generator = seeded_generator(environment.seed, purpose, context.round, context.client)
        watch = _Watch(client, context, phase, environment)

        def make_trainer(callbacks: Sequence[L.Callback] = (), **options: Any) -> L.Trainer:
            own = [*copy.deepcopy(self.callbacks), *callbacks, watch]
            return self.make_trainer(environment, own, **{"max_epochs": phase.epochs, **options})

        with silence():
            logged = client.fit_under_trainer(make_trainer, context, generator)
        if watch.error is not None:
            raise watch.error
        logged = {n: v for n, v in logged.items() if n not in watch.steps}
        return PhaseResult(means_of(watch.steps) | logged, watch.count.num_steps, watch.is_cut)

    def make_trainer(
        self,
        environment: FitEnvironment,
        callbacks: Sequence[L.Callback] = (),
        kind: type[L.Trainer] = L.Trainer,
        **options: Any,
    ) -> L.Trainer:
        """Return a new silent Trainer without checkpoints, and without a logger unless one is given.

        Args:
            environment: Device and precision.
            callbacks: Its callbacks.
            kind: Its class.
            options: Further options of ``L.Trainer``, which take precedence.
        """
        if self.gradient_clip_val is not None:
            options["gradient_clip_val"] = self.gradient_clip_val
            options["gradient_clip_algorithm"] = self.gradient_clip_algorithm
        options = {"logger": False, "limit_val_batches": 0, "max_epochs": 1, **options}
        if self.limit_val_batches is not None and options["limit_val_batches"] != 0:
            options["limit_val_batches"] = self.limit_val_batches
        logger, callbacks, device = options.pop("logger"), list(callbacks), environment.device
        key = (kind, device, environment.precision_name, torch.is_anomaly_enabled(), *options.items())
        if key not in self._copiers:
            made: Any = silent_trainer(
                kind,
                accelerator=device.type,
                devices=1 if device.type == "cpu" else [device.index or 0],
                precision=environment.precision_name,
                callbacks=callbacks,
                accumulate_grad_batches=self.accumulate_grad_batches,
                limit_train_batches=self.limit_train_batches,
                limit_test_batches=self.limit_test_batches,
                max_steps=self.max_steps,
                profiler=NothingProfiled(),
                detect_anomaly=torch.is_anomaly_enabled(),  # by the outer Trainer; a Trainer sets it for its own time
                barebones=False,
                num_sanity_val_steps=0,
                use_distributed_sampler=False,
                inference_mode=False,  # whose tensors could not train
                default_root_dir=os.devnull,  # a job of SLURM resumes from checkpoints there: the outer Trainer's
                **options,
            )
            made.callbacks = [each for each in made.callbacks if each not in callbacks]  # those of other packages
            self._copiers[key] = _copier(made)
        trainer = self._copiers[key]()
        trainer.callbacks = [*callbacks, *trainer.callbacks]
        trainer.loggers = [logger] if isinstance(logger, Logger) else list(logger or ())
        keep_fewer_signals(trainer)
        return trainer  # type: ignore[no-any-return]


def _copier(trainer: L.Trainer) -> Callable[[], Any]:
    """Function that copies a Trainer; from bytes it takes a fraction of the time of ``copy.deepcopy``."""
    try:
        return partial(pickle.loads, pickle.dumps(trainer))
    except Exception:  # of a callback of another package that cannot be pickled
        return partial(copy.deepcopy, trainer)


class _Watch(L.Callback):
    """Collects the loss terms and counts the steps; stops at the fit's ``max_steps``, or after a non-finite loss."""

    def __init__(self, client: FederatedClient, context: FitContext, phase: Phase, environment: FitEnvironment) -> None:
        self.client, self.context, self.phase, self.environment = client, context, phase, environment
        self.steps: dict[str, list[Tensor]] = {}
        self.error: NonFiniteLossError | None = None
        self.count = StepCount()
        self.epochs, self.is_cut = 0, False

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.epochs += 1

    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self.count = StepCount(trainer.optimizers)
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            trainer.precision_plugin.scaler = new_scaler(self.environment, self.client.loss_scale)
        if self.context.earlier_fits is not None:  # None for a user's module, whose stream may have no length
            self._advance_schedules(trainer)

    def _advance_schedules(self, trainer: L.Trainer) -> None:
        batches = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        steps = self.phase.epochs * batches
        if trainer.max_steps != -1:
            steps = min(steps, trainer.max_steps)
        for config in trainer.lr_scheduler_configs:
            if config.frequency != 1:
                raise ConfigurationError(
                    f"a frequency of {config.frequency} counts within a local fit: let the scheduler itself count, or "
                    "use schedule='restart', under which it starts again in every local fit"
                )
            often = steps if config.interval == "step" else math.ceil(steps / batches)
            advance(config.scheduler, self.client, self.phase, self.context, often)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        terms = outputs if isinstance(outputs, dict) else {} if outputs is None else {"loss": outputs}
        for name, value in terms.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                # Lightning divides the loss by the number of batches whose gradients are accumulated.
                scale = trainer.accumulate_grad_batches if name == "loss" else 1
                self.steps.setdefault(name, []).append(value.detach() * scale)
        # Not by the Trainer's own limit, by which a module may lay out its schedules.
        if self.count.calls >= self.context.max_steps:
            self.is_cut = not (trainer.is_last_batch and self.epochs == self.phase.epochs)
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            self.client.loss_scale = json.dumps(trainer.precision_plugin.scaler.state_dict()).encode()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        try:
            check_finite_losses(self.steps.get("loss", []), self.context, self.phase)
        except NonFiniteLossError as error:
            self.error = error  # an exception inside the inner Trainer would tear down more than this fit
            trainer.should_stop = True


_NOTHING: AbstractContextManager[Any] = nullcontext()


class NothingProfiled(PassThroughProfiler):
    """Times nothing, as Lightning's own, without a generator around each hook of each callback."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """A context that does nothing."""
        return _NOTHING
