"""Private names of Lightning that are used here, each behind a function and with a test.

What one feature uses alone stands with it: ``drop_in/forms/trainer_data`` (what a Trainer was given),
``drop_in/fits/inner_trainer`` (records of logged values), ``federation/preemption`` (signals of SLURM).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

__all__ = [
    "HYPERPARAMETERS",
    "VALIDATION_TIME",
    "attached",
    "batches_that_stepped",
    "callback_values",
    "combining_mode",
    "end_after_epochs",
    "has_trainer",
    "hyperparameters_of",
    "keep_fewer_signals",
    "name_of_hyperparameters",
    "put_root_dir",
    "seconds_between_validations",
    "set_batches_that_stepped",
    "steps_between_checkpoints",
    "trainer_or_none",
    "values_for_loggers",
    "with_own_metrics",
]

VALIDATION_TIME = "_val_check_time_interval"
"""The attribute of a Trainer that has ``val_check_interval`` as a time, in newer versions."""

HYPERPARAMETERS = frozenset({"_hparams", "_hparams_initial", "_hparams_name"})
"""The attributes of a module that hold its hyper-parameters."""

# ---------------------------------------------------------------------- modules


def trainer_or_none(module: Any) -> Any:
    """The Trainer of a module or data module; ``None``, not an error, where it has none."""
    return module._trainer


def has_trainer(module: Any) -> bool:
    """Whether a module has a Trainer, or a Fabric in the place of one."""
    return module._trainer is not None or module._fabric is not None


@contextmanager
def attached(module: Any, trainer: Any) -> Iterator[None]:
    """Inside, a module has a Trainer."""
    before = module._trainer
    module.trainer = trainer
    try:
        yield
    finally:
        module._trainer = before


def hyperparameters_of(owner: Any) -> Mapping[str, Any] | None:
    """The hyper-parameters of a module or data module; ``None`` where loggers get none of it."""
    return owner.hparams_initial if getattr(owner, "_log_hyperparams", False) else None


def name_of_hyperparameters(module: Any) -> str | None:
    """The argument of the module's ``__init__`` that takes all hyper-parameters; ``None`` before they are saved."""
    return getattr(module, "_hparams_name", None)


# ---------------------------------------------------------------------- Trainers


def batches_that_stepped(trainer: Any) -> int:
    """The step under which a Trainer logs."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def set_batches_that_stepped(trainer: Any, number: int) -> None:
    """Let a Trainer log under a step."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = number


def callback_values(trainer: Any) -> set[str]:
    """Names of the values that callbacks find in a Trainer, also of what callbacks have put there."""
    return {*trainer._logger_connector._callback_metrics}


def values_for_loggers(trainer: Any) -> set[str]:
    """Names of the values that loggers get of a Trainer."""
    return {*trainer._logger_connector._logged_metrics}


def with_own_metrics(trainer: Any, name: str, kind: type[dict[str, Any]]) -> Any:
    """The values of a Trainer (``"callback_metrics"``, ...), from now on in a dictionary of a class."""
    connector = trainer._logger_connector
    values = getattr(connector, name)
    if type(values) is not kind:
        values = kind(values)
        setattr(connector, f"_{name}", values)
    return values


def put_root_dir(trainer: Any, folder: str) -> None:
    """Give a Trainer another folder."""
    trainer._default_root_dir = folder


def seconds_between_validations(trainer: Any) -> float | None:
    """``val_check_interval`` as a time; ``None`` where it is none, and in versions that know none."""
    found: float | None = getattr(trainer, VALIDATION_TIME, None)
    return found


def keep_fewer_signals(trainer: Any) -> None:
    """Let a Trainer put back the handlers of signals that it may have changed, not of all that there are."""
    connector = trainer._signal_connector
    if hasattr(connector, "_get_current_signal_handlers"):
        connector._get_current_signal_handlers = partial(_handlers, trainer)


def _handlers(trainer: Any) -> dict[Any, Any]:
    names = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")  # Windows has two of them
    found = {getattr(signal, name) for name in names if hasattr(signal, name)}
    environment = trainer._accelerator_connector.cluster_environment
    requeue = getattr(environment, "requeue_signal", None)  # of a SLURMEnvironment
    return {number: signal.getsignal(number) for number in (found if requeue is None else found | {requeue})}


# ---------------------------------------------------------------------- callbacks and loaders


def end_after_epochs(timer: Any) -> None:
    """Let a Timer look at the clock after each epoch, not after each step."""
    if timer._interval == "step":
        timer._interval = "epoch"


def steps_between_checkpoints(callback: Any) -> int:
    """The ``every_n_train_steps`` of a ModelCheckpoint; 0 for none, and of other callbacks."""
    return int(getattr(callback, "_every_n_train_steps", 0))


def combining_mode(loader: Any) -> Any:
    """The mode of a CombinedLoader."""
    return loader._mode
