"""Validation inside local fits, where a module's schedules or the callbacks of local fits watch one of its values."""

from __future__ import annotations

import logging
from inspect import unwrap
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.lr_scheduler import LRScheduler

from pfl_lightning.client import FitContext
from pfl_lightning.data import BatchSource
from pfl_lightning.drop_in.fits.continuity import Course
from pfl_lightning.drop_in.fits.inner_trainer import give_metrics, metrics_of, reads_metrics

__all__ = ["LocalValidation"]

_log = logging.getLogger(__name__)

_HOOKS = ("on_validation_epoch_start", "on_validation_epoch_end", "on_validation_start", "on_validation_end")
_STEPPING = {"lr_schedulers", "lr_scheduler_configs", "step"}
_PACKAGES = ("lightning.", "pytorch_lightning.", "torch.")


class LocalValidation(L.Callback):
    """Lets an inner Trainer validate after each epoch if something watches a value that the training does not log.

    Such are a ReduceLROnPlateau on ``val_loss`` and an EarlyStopping in local fits, a module with manual optimization
    that steps its schedulers in a hook of the validation, and code of the module or of callbacks of local fits that
    reads the Trainer's metrics (``callback_metrics``, ...), where a plain fit has those of its validation. A client
    without a validation part, and a module without a validation step, train on with such a schedule unstepped, and say
    so.

    The outer Trainer's ``check_val_every_n_epoch``, which counts its rounds, is what the module reads inside. Where all
    that asks for a validation are schedules of that frequency, and hooks, local epochs without one are left out, too.

    Args:
        trainer: The Trainer, made with the limit of validation batches that holds if it validates.
        module: The module that it fits.
        context: Client and data of the fit.
        logged: Names that the training logs, as they come.
        every: What the module finds as ``check_val_every_n_epoch``.
        course: What goes on from the client's last fit; ``None`` for nothing.
    """

    def __init__(
        self,
        trainer: Any,
        module: L.LightningModule,
        context: FitContext,
        logged: set[str],
        every: int = 1,
        course: Course | None = None,
    ) -> None:
        self._course = course
        self._limit, self._context, self._logged, self._every = trainer.limit_val_batches, context, logged, every
        trainer.limit_val_batches = 0
        self._reads = reads_metrics(module, trainer.callbacks)
        part = context.data.validation
        self._reason = None
        if part is None or not len(part):
            self._reason = f"client {context.client} has no validation part"
        elif not is_overridden("validation_step", module):
            self._reason = f"{type(module).__name__} has no validation_step"

    def loader(self) -> BatchSource | None:
        """The client's own validation part in batches on the host; ``None`` where there is nothing to validate."""
        data = self._context.data
        if self._reason is not None or data.validation is None:
            return None
        return data.validation.loader(
            data.eval_batch_size, device="cpu" if data.datamodule is not None else data.device
        )

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        """Show the number, when callbacks that act by that of their own Trainer have looked at it."""
        trainer.check_val_every_n_epoch = self._every
        trainer.without_validation = self._reason

    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Let a module that reads the Trainer's metrics find those of the client's last fit."""
        if self._reads and self._course is not None:
            give_metrics(trainer, self._course.metrics)

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
        known = {f"{name}{end}" for name in self._logged for end in ("", "_step", "_epoch")}
        missing = [each for each in watched if each.monitor not in known]
        plateau = not pl_module.automatic_optimization and _has_plateau(trainer)
        steps = plateau or _steps_in_validation(trainer, pl_module)
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


def _has_plateau(trainer: Any) -> bool:
    return any(hasattr(config.scheduler, "num_bad_epochs") for config in trainer.lr_scheduler_configs)


def _steps_in_validation(trainer: Any, module: L.LightningModule) -> bool:
    """Whether the module itself steps schedulers in a hook of the validation."""
    held = any(isinstance(value, LRScheduler) for value in vars(module).values())
    if module.automatic_optimization or not (trainer.lr_scheduler_configs or held):
        return False
    seen = set[str]()
    return any(_steps(module, name, seen) for name in _HOOKS)


def _steps(module: L.LightningModule, name: str, seen: set[str]) -> bool:
    """Whether the code of a hook, or of methods of the module that it calls, names schedulers or their ``step``."""
    if name in seen:
        return False
    seen.add(name)
    kinds = [kind for kind in type(module).__mro__ if not f"{kind.__module__}.".startswith(_PACKAGES)]
    codes = [getattr(unwrap(vars(kind)[name]), "__code__", None) for kind in kinds if callable(vars(kind).get(name))]
    names = {each for code in codes if code is not None for each in code.co_names}
    own = [each for each in names if hasattr(type(module), each)]
    return not names.isdisjoint(_STEPPING) or any(_steps(module, each, seen) for each in own)
