"""One phase of a local fit of a user's module under an inner Trainer, as it would run without a federation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from pfl_lightning.client import FitContext
from pfl_lightning.data import BatchSource
from pfl_lightning.datamodules.adapters.items import LoaderEpoch
from pfl_lightning.drop_in.fits.inner_trainer import give_metrics, metrics_of, reads_metrics
from pfl_lightning.drop_in.fits.logs import LogRecord, reduction_name, undefined_as_nan
from pfl_lightning.drop_in.fits.module_calls import flat_objects, lent_to_trainer
from pfl_lightning.drop_in.fits.over_rounds import Counts, FitProgress, Resumption
from pfl_lightning.drop_in.fits.own_data import OwnData, standing_in
from pfl_lightning.drop_in.forms.given_data import is_of_module
from pfl_lightning.federation.outer_callbacks import lightning_kinds
from pfl_lightning.fit.tasks import MakeTrainer

if TYPE_CHECKING:
    from pfl_lightning.drop_in.client.user_module import UserModule

_log = logging.getLogger(__name__)

_HOOKS = ("on_validation_epoch_start", "on_validation_epoch_end", "on_validation_start", "on_validation_end")


def fit_module(
    model: UserModule, make_trainer: MakeTrainer, context: FitContext, generator: torch.Generator
) -> dict[str, float]:
    """Fit a client's module on the client's batches, with the project's data module where there is one.

    Returns:
        Values that the module logged, by name.
    """
    module, progress, record = model.step_module, model.progress, LogRecord(in_training=True)
    goes_on = progress is not None and progress.settings.continues
    loader, datamodule = _loader_for_trainer(context, generator), context.data.datamodule
    with lent_to_trainer(module, **_functions(model, record)), undefined_as_nan(module):
        gradients = [] if module.automatic_optimization else [_MethodGradients(model)]
        rates = model.client.logged_metrics
        trainer = model.local.trainer(make_trainer, module, gradients, rates, limit_val_batches=1.0)
        validation = LocalValidation(trainer, module, context, record, model.local.outer.validates_every, progress)
        trainer.callbacks.append(validation)
        _begin_at(
            loader,
            progress.counts.epochs if progress is not None else 0,
            0 if goes_on else context.round * trainer.max_epochs,
        )
        resumption = None
        if progress is not None and goes_on:
            resumption = Resumption(trainer, progress, context.facts.num_rounds)
            trainer.callbacks.insert(0, resumption)  # before other callbacks change optimizers and schedules
        if datamodule is None:
            trainer.fit(module, train_dataloaders=loader, val_dataloaders=validation.loader())
        else:
            loaders = {"train_dataloader": loader, "val_dataloader": validation.loader()}
            trainer.fit(module, datamodule=standing_in(datamodule, loaders, OwnData(context.data)))
        if progress is not None:
            changed = None if resumption is None else resumption.changed
            progress.finish_phase(Counts.of(trainer), changed, validation.metrics(trainer))
        client = model.client
        client.progress_bar_names |= record.progress_bar_names
        client.logged_reductions = {**client.logged_reductions, **record.reductions}
        return _logged_values(trainer, record)


def _loader_for_trainer(context: FitContext, generator: torch.Generator) -> BatchSource | None:
    """Training batches; where hooks of a data module go with them, on the host, as the Trainer expects them.

    ``None`` where the Trainer asks the module for its own stream.
    """
    data = context.data
    if is_of_module(data.part):
        return None
    if data.datamodule is not None:
        data = replace(data, device=torch.device("cpu"))
    return data.loader(generator)


def _begin_at(loader: Any, epoch: int, before: int) -> None:
    """Let loaders begin at an epoch: a Trainer asks for the first batch before it tells them which it is.

    Args:
        loader: The loader, or several as one.
        epoch: The Trainer's first epoch.
        before: Epochs in earlier rounds, where every local fit begins at epoch 0; each phase counts its own.
    """
    for each in getattr(loader, "flattened", [loader]):
        told = getattr(each, "batch_sampler", None)
        if isinstance(told, LoaderEpoch):
            told.told, told.before = epoch, before


def _functions(model: UserModule, record: LogRecord) -> dict[str, Callable[..., Any]]:
    """What stands in the place of the module's own: the step has the method's terms, and what it logs is recorded."""
    module, progress = model.step_module, model.progress
    own_step, own_optimizers, own_log = module.training_step, module.configure_optimizers, module.log
    epochs = progress.counts.epochs if progress is not None and progress.settings.continues else 0

    # Of a method on features, `own_step` already is the one that keeps features (`FeatureModule.fit_under_trainer`).
    @wraps(own_step)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        output = own_step(*args, **kwargs)
        return model.with_method_terms(output) if module.automatic_optimization else output

    @wraps(own_log)
    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if module.trainer.validating:  # which a schedule has asked for: the client's evaluation logs these
            own_log(name, value, *args, **kwargs)
            return
        record.names.add(name)
        record.note(name, value, *args, **kwargs)
        if len(args) < 3:  # on_step and on_epoch are not given by place
            if isinstance(value, Metric):  # the Trainer computes and resets it at the end of the epoch
                kwargs |= {"on_step": bool(kwargs.get("on_step") and kwargs.get("on_epoch")), "on_epoch": True}
            elif reduction_name(kwargs.get("reduce_fx", "mean")) is not None:
                record.log(name, value, **kwargs)
        own_log(name, value, *args, **kwargs)

    @wraps(own_optimizers)
    def configure_optimizers() -> Any:
        callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
        return model.optimizers_from(lambda: _thaw_again(own_optimizers(), callbacks, module, epochs))

    return {"training_step": training_step, "configure_optimizers": configure_optimizers, "log": log}


def _thaw_again(configured: Any, callbacks: Iterable[L.Callback], module: L.LightningModule, epochs: int) -> Any:
    """Let ``BaseFinetuning`` callbacks do again what they did at the epochs of a client's earlier local fits.

    Every local fit has a new copy of them, which freezes the module, and new optimizers without the groups that were
    added. It comes before the optimizers take over their rates and states, so that those of added groups have a place.
    """
    tuning: list[Any] = [callback for callback in callbacks if "BaseFinetuning" in lightning_kinds(callback)]
    optimizers = [found for found in flat_objects(configured) if isinstance(found, Optimizer)]
    for callback in tuning:
        for epoch in range(epochs):
            for optimizer in optimizers:
                callback.finetune_function(module, epoch, optimizer)
    return configured


def _logged_values(trainer: L.Trainer, record: LogRecord) -> dict[str, float]:
    """What a module logged in a fit: means over the last epoch; what cannot be recorded, as the Trainer has it."""
    known = {name: float(value) for name, value in trainer.callback_metrics.items()}
    own = {n: v for n, v in record.values().items() if n in record.names or n in known}
    trained = {f"{name}{end}" for name in record.names for end in ("", "_step", "_epoch")}
    return {n: v for n, v in known.items() if n in trained} | own


class _MethodGradients(L.Callback):
    """Adds the gradient of the method's terms before every step of an optimizer, for a module that steps by itself."""

    def __init__(self, model: UserModule) -> None:
        self._model = model

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        with torch.enable_grad():
            terms = list(self._model.method_terms().values())
        if not terms:
            return
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        gradients = torch.autograd.grad(torch.stack(terms).sum(), trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class LocalValidation(L.Callback):
    """Lets an inner Trainer validate after each epoch if something watches a value that the training does not log.

    Such are a ReduceLROnPlateau on ``val_loss`` and an EarlyStopping in local fits, a module with manual optimization,
    schedulers and a hook of the validation, which may step them there, and code of the module or of callbacks of local
    fits that reads the Trainer's metrics (``callback_metrics``, ...), where a plain fit has those of its validation. A
    client without a validation part, and a module without a validation step, train on with such a schedule unstepped,
    and say so.

    The outer Trainer's ``check_val_every_n_epoch``, which counts its rounds, is what the module reads inside. Where all
    that asks for a validation are schedules of that frequency, and hooks, local epochs without one are left out, too.

    It tells the record of what the training logs of epochs and batches.

    Args:
        trainer: The Trainer, made with the limit of validation batches that holds if it validates.
        module: The module that it fits.
        context: Client and data of the fit.
        record: Takes what the training logs.
        every: What the module finds as ``check_val_every_n_epoch``.
        progress: What goes on from the client's last fit; ``None`` for nothing.
    """

    def __init__(
        self,
        trainer: Any,
        module: L.LightningModule,
        context: FitContext,
        record: LogRecord,
        every: int,
        progress: FitProgress | None,
    ) -> None:
        self._earlier = None if progress is None else progress.earlier.metrics
        self._limit, self._data, self._record, self._every = trainer.limit_val_batches, context.data, record, every
        trainer.limit_val_batches = 0
        self._reads = reads_metrics(module, trainer.callbacks)
        self._reason = None
        if self._data.validation is None or not len(self._data.validation):
            self._reason = f"{context.who} has no validation part"
        elif not is_overridden("validation_step", module):
            self._reason = f"{type(module).__name__} has no validation_step"

    def loader(self) -> BatchSource | None:
        """The client's own validation part in batches on the host; ``None`` where there is nothing to validate."""
        data = self._data
        if self._reason is not None or data.validation is None:
            return None
        return data.validation.loader(
            data.eval_batch_size, device="cpu" if data.datamodule is not None else data.device
        )

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        """Show the number, when callbacks that act by that of their own Trainer have looked at it."""
        trainer.check_val_every_n_epoch = self._every

    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Let a module that reads the Trainer's metrics find those of the client's last fit."""
        if self._reads and self._earlier is not None:
            give_metrics(trainer, self._earlier)

    def on_train_epoch_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """An epoch of the record."""
        self._record.start_epoch()

    def on_train_batch_start(self, trainer: Any, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """A batch of the record."""
        self._record.start_batch(batch)

    def metrics(self, trainer: Any) -> dict[str, dict[str, float]]:
        """What such a module is to find in the client's next fit."""
        return metrics_of(trainer) if self._reads else {}

    def on_validation_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Show it again, after it has let this validation be."""
        trainer.check_val_every_n_epoch = self._every

    def on_train_batch_end(self, trainer: Any, pl_module: L.LightningModule, *args: Any) -> None:
        """Validate after this epoch, if anything asks for it."""
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return
        watched = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        watched += [each for each in trainer.callbacks if getattr(each, "monitor", None) is not None]
        known = {f"{name}{end}" for name in self._record.names for end in ("", "_step", "_epoch")}
        missing = [each for each in watched if each.monitor not in known]
        stepped = [] if pl_module.automatic_optimization else trainer.lr_scheduler_configs
        plateau = any(hasattr(config.scheduler, "num_bad_epochs") for config in stepped)
        steps = plateau or _may_step_in_validation(trainer, pl_module)
        if not (missing or steps or self._reads):
            return
        if self._reason is None:
            trainer.limit_val_batches = self._limit
            if plateau or any(getattr(each, "frequency", 1) % self._every for each in missing):
                trainer.check_val_every_n_epoch = 1
            return
        if not (missing or steps):
            return  # who asks for what is not there is told
        for each in missing:
            each.strict = False  # it would end the run
        names = ", ".join(sorted({each.monitor for each in missing})) or "a value of the validation"
        _log.warning(
            "%s: what watches %s in its local fits (a ReduceLROnPlateau, a callback) is left as it is",
            self._reason,
            names,
        )


def _may_step_in_validation(trainer: Any, module: L.LightningModule) -> bool:
    """Whether the module steps its optimizers by itself, has schedulers, and has a hook of the validation."""
    held = any(isinstance(value, LRScheduler) for value in vars(module).values())
    schedules = not module.automatic_optimization and (trainer.lr_scheduler_configs or held)
    return bool(schedules) and any(is_overridden(hook, module) for hook in _HOOKS)
