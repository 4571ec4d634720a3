"""A user's LightningModule under an inner Trainer, as it would run without a federation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import lightning as L
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from pfl_lightning.client import FitContext
from pfl_lightning.data import BatchSource
from pfl_lightning.datamodules.adapters.items import LoaderEpoch
from pfl_lightning.drop_in.client.module_client import ModuleClient
from pfl_lightning.drop_in.fits.counters import Counts, CourseCallback, set_counts
from pfl_lightning.drop_in.fits.finetuning import thaw_again
from pfl_lightning.drop_in.fits.kept_modes import KeptModes
from pfl_lightning.drop_in.fits.logs import LogNotes, LogRecord, reduction_name, undefined_as_nan
from pfl_lightning.drop_in.fits.module_calls import patched
from pfl_lightning.drop_in.fits.module_evaluation import ClassScores, StepsTask
from pfl_lightning.drop_in.fits.own_data import OwnData
from pfl_lightning.drop_in.fits.validation import LocalValidation
from pfl_lightning.drop_in.forms.given_data import is_of_module
from pfl_lightning.engines.notices import silence
from pfl_lightning.fit.tasks import MakeTrainer

__all__ = ["fit_module", "run_steps_under_trainer", "standing_in"]


@contextmanager
def _module_under_trainer(module: L.LightningModule, **functions: Callable[..., Any]) -> Iterator[None]:
    """Lend a module to an inner Trainer.

    ``setup`` and its like were called when the federation was set up; called again, they might make the layers again.

    Args:
        module: The module.
        functions: What stands in the place of its methods.
    """
    done = dict.fromkeys(("setup", "teardown", "prepare_data", "configure_model"), _nothing)
    try:
        with patched(module, **done, configure_callbacks=list, **functions):  # the outer Trainer has its callbacks
            yield
    finally:
        module.trainer = None


@contextmanager
def _module_in_fit(client: ModuleClient) -> Iterator[tuple[LogRecord, list[L.Callback]]]:
    """Let the module's step have the method's terms, and record the means of what it logs.

    Yields:
        What was logged, and callbacks of the inner Trainer.
    """
    module = client.step_module
    own_step, own_optimizers, own_log = module.training_step, module.configure_optimizers, module.log

    @wraps(own_step)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        output = own_step(*args, **kwargs)
        return client.with_method_terms(output) if module.automatic_optimization else output

    record = LogRecord(in_training=True)
    course = client.course
    epochs = course.counts.epochs if course is not None and course.settings.continues else 0

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
        return client.optimizers_from(lambda: thaw_again(own_optimizers(), callbacks, module, epochs))

    functions: dict[str, Any] = {
        "training_step": training_step,
        "configure_optimizers": configure_optimizers,
        "log": log,
    }
    with _module_under_trainer(module, **functions), undefined_as_nan(module):
        gradients = [] if module.automatic_optimization else [_MethodGradients(client)]
        yield record, [*gradients, _RecordCallback(record)]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Done before."""


class _RecordCallback(L.Callback):
    """Tells a record of epochs and batches."""

    def __init__(self, record: LogRecord) -> None:
        self._record = record

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._record.start_epoch()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._record.start_batch(batch)


class _MethodGradients(L.Callback):
    """Adds the gradient of the method's terms before every step of an optimizer, for a module that steps by itself."""

    def __init__(self, client: ModuleClient) -> None:
        self._client = client

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        with torch.enable_grad():
            terms = list(self._client.method_terms().values())
        if not terms:
            return
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        gradients = torch.autograd.grad(torch.stack(terms).sum(), trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class _ScoresCallback(L.Callback):
    """Shows every evaluated batch to a :class:`ClassScores`, and notes of which of several loaders it is."""

    def __init__(self, scores: ClassScores, notes: LogNotes) -> None:
        self._scores, self._notes = scores, notes

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Note the loader."""
        self._notes.loader = dataloader_idx

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """There are no more batches."""
        self._notes.loader = None

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Show a validation batch."""
        self._scores.see(batch)

    on_test_batch_start = on_validation_batch_start
    on_test_epoch_end = on_validation_epoch_end
    on_test_batch_end = on_validation_batch_end


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
        before: Epochs that came before it, where every local fit begins at epoch 0.
    """
    for each in getattr(loader, "flattened", [loader]):
        told = getattr(each, "batch_sampler", None)
        if isinstance(told, LoaderEpoch):
            told.told, told.before = epoch, before


def fit_module(
    client: ModuleClient, make_trainer: MakeTrainer, context: FitContext, generator: torch.Generator
) -> dict[str, float]:
    """Fit a client's module on the client's batches, with the project's data module where there is one.

    Returns:
        Values that the module logged, by name.
    """
    loader, datamodule = _loader_for_trainer(context, generator), context.data.datamodule
    with _module_in_fit(client) as (record, callbacks):
        trainer: Any = client.local.trainer_of_fit(make_trainer, client, callbacks, limit_val_batches=1.0)
        course, every = client.course, client.local.outer.validates_every
        validation = LocalValidation(trainer, client.step_module, context, record.names, every, course)
        trainer.callbacks.append(validation)
        kept = KeptModes(course.changed if course is not None else {})
        goes_on = course is not None and course.settings.continues
        _begin_at(
            loader,
            course.counts.epochs if course is not None else 0,
            0 if goes_on else context.round * trainer.max_epochs,
        )
        if course is not None and course.settings.continues:
            trainer.callbacks.append(CourseCallback(trainer, course.counts, context.facts.num_rounds))
            trainer.callbacks.insert(0, kept)  # before hooks that change more
        if datamodule is None:
            trainer.fit(client.step_module, train_dataloaders=loader, val_dataloaders=validation.loader())
        else:
            loaders = {"train_dataloader": loader, "val_dataloader": validation.loader()}
            own = OwnData(context.data)
            trainer.fit(client.step_module, datamodule=standing_in(datamodule, loaders, own))
        if course is not None:
            course.finish_phase(CourseCallback.counts_of(trainer), kept.changed, validation.metrics(trainer))
        client.shown_metrics |= record.shown
        client.logged_reductions = {**client.logged_reductions, **record.reductions}
        return _logged_values(trainer, record)


def run_steps_under_trainer(task: StepsTask, make_trainer: MakeTrainer) -> dict[str, float] | None:
    """Run the validation or test loop of a Trainer on one client's batches.

    Returns:
        Values that the module logged, by name; ``None`` where the engine has no inner Trainer.
    """
    callback = _ScoresCallback(task.scores, task.notes)
    with silence():
        module = task.client.module
        trainer = task.client.local.trainer_of_evaluation(make_trainer, module, [callback], limit_val_batches=1.0)
    if trainer is None:
        return None
    clock = task.environment.clock
    set_counts(trainer, Counts(clock.epoch, clock.step, clock.step))
    trainer.fit_loop.max_epochs = clock.max_epochs
    validates, datamodule = task.stage == "validation", task.part.datamodule  # a loader of the call has none
    run: Callable[..., Any] = trainer.validate if validates else trainer.test
    functions = {"log": task.notes.watched(module.log), "optimizers": _optimizers_when_asked_for(module)}
    with silence(), _module_under_trainer(module, **functions):
        if datamodule is None:
            run(module, dataloaders=task.loader(task.environment.device), verbose=False)
        else:
            loader = task.loader(torch.device("cpu"))
            name = "val_dataloader" if validates else "test_dataloader"
            run(module, datamodule=standing_in(datamodule, {name: loader}, task.own), verbose=False)
    task.client.to(task.environment.device)
    task.client.eval()
    return _numbers(trainer.callback_metrics)


def _optimizers_when_asked_for(module: L.LightningModule) -> Callable[..., Any]:
    """``optimizers`` of a module whose steps ask for them where none are: in a plain fit there are some."""
    own = module.optimizers

    @wraps(own)
    def optimizers(*args: Any, **kwargs: Any) -> Any:
        made = module.trainer.optimizers  # which makes those that the strategy gives
        return own(*args, **kwargs) if made else made

    return optimizers


def standing_in(
    datamodule: LightningDataModule, loaders: Mapping[str, BatchSource | None], own: OwnData
) -> LightningDataModule:
    """The data module of one client: with its batches as loaders, and its items in attributes; it is set up already.

    Args:
        datamodule: The data module.
        loaders: Those that its Trainer asks for, by the names of the hooks.
        own: What the client has of the data.
    """
    found = copy.copy(datamodule)
    functions: dict[str, Any] = dict.fromkeys(("prepare_data", "setup", "teardown"), _nothing)
    functions |= own.attributes(datamodule) | own.hooks(datamodule)
    for name, loader in loaders.items():
        functions[name] = partial(_given, loader if loader is not None else [])
    vars(found).update(functions)
    return found


def _given(loader: Any) -> Any:
    return loader


def _numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Logged values as floats."""
    return {name: float(value) for name, value in metrics.items()}


def _logged_values(trainer: L.Trainer, record: LogRecord) -> dict[str, float]:
    """What a module logged in a fit: means over the last epoch; what cannot be recorded, as the Trainer has it."""
    known, own = _numbers(trainer.callback_metrics), record.values()
    trained = {f"{name}{end}" for name in record.names for end in ("", "_step", "_epoch")}
    own = {n: v for n, v in own.items() if n in record.names or n in known}
    return {n: v for n, v in known.items() if n in trained} | own
