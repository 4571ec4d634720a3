"""Private names of Lightning that are used here, each behind a function and with a test; and Trainers without a word.

What one feature uses alone stands with it: ``drop_in/fits/inner_trainer`` (records of logged values),
``federation/preemption`` (signals of SLURM).
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core import optimizer as optimizers_of_modules
from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.notices import silence
from pfl_lightning.older_package import is_older

VALIDATION_TIME = "_val_check_time_interval"
"""The attribute of a Trainer that has ``val_check_interval`` as a time, in newer versions."""

HYPERPARAMETERS = frozenset({"_hparams", "_hparams_initial", "_hparams_name"})
"""The attributes of a module that hold its hyper-parameters."""

# ---------------------------------------------------------------------- modules


def configured(returned: Any) -> tuple[list[Any], list[Any]]:
    """What a ``configure_optimizers`` has returned: the optimizers, and a configuration for each scheduler.

    Raises:
        MisconfigurationException: It is not what Lightning takes.
    """
    optimizers, schedulers, monitor = optimizers_of_modules._configure_optimizers(returned)
    return optimizers, optimizers_of_modules._configure_schedulers_automatic_opt(schedulers, monitor or "none")


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


def put_values(trainer: Any, values: Mapping[str, float], in_bar: Collection[str]) -> None:
    """Put values where callbacks find them, and progress bars some; ``log`` would take half a millisecond for each."""
    held = {name: torch.tensor(float(value)) for name, value in values.items()}
    trainer.callback_metrics.update(held)
    trainer.progress_bar_metrics.update({name: float(held[name]) for name in held if name in in_bar})


def values_for_loggers(trainer: Any) -> set[str]:
    """Names of the values that loggers get of a Trainer."""
    return {*trainer._logger_connector._logged_metrics}


def put_root_dir(trainer: Any, folder: str) -> None:
    """Give a Trainer another folder."""
    trainer._default_root_dir = folder


def silent_trainer(kind: type[L.Trainer] = L.Trainer, **options: Any) -> L.Trainer:
    """A Trainer that writes, shows and says nothing of itself.

    Args:
        kind: Its class.
        options: Options of the Trainer.
    """
    shows = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    with silence():
        return kind(**{**dict.fromkeys(shows, False), **options})


def seconds_between_validations(trainer: Any) -> float | None:
    """``val_check_interval`` as a time; ``None`` where it is none, and in versions that know none."""
    return getattr(trainer, VALIDATION_TIME, None)


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


# ---------------------------------------------------------------------- what a Trainer was given


@dataclass(frozen=True, eq=False)
class GivenData:
    """The data of a call of ``trainer.fit``, ``validate``, ``test`` or ``predict``.

    Attributes:
        datamodule: The data module, if one was given.
        loaders: Loaders that were given, by the names of these arguments of ``trainer.fit`` (``train_dataloaders``).
    """

    datamodule: Any = None
    loaders: Mapping[str, Any] = field(default_factory=dict)

    def is_part_of(self, other: GivenData) -> bool:
        """Whether the same objects were given in another call."""
        return all(other.loaders.get(name) is loader for name, loader in self.loaders.items()) and (
            self.datamodule is None or self.datamodule is other.datamodule
        )

    @property
    def is_for_evaluation(self) -> bool:
        """Whether these are loaders without one for training."""
        return bool(self.loaders) and "train_dataloaders" not in self.loaders


def trainer_of(log: Any) -> L.Trainer:
    """The Trainer that assigns ``log``, a method of the module that it was given, to its callbacks."""
    trainer: L.Trainer = log.__self__.trainer
    return trainer


def data_given_to(trainer: Any, module: Any) -> GivenData:
    """What the call under way was given: the loops hold it, since ``trainer.datamodule`` may be of an earlier call."""
    loops = {
        TrainerFn.FITTING: {
            "train_dataloaders": trainer.fit_loop,
            "val_dataloaders": trainer.fit_loop.epoch_loop.val_loop,
        },
        TrainerFn.VALIDATING: {"val_dataloaders": trainer.validate_loop},
        TrainerFn.TESTING: {"test_dataloaders": trainer.test_loop},
        TrainerFn.PREDICTING: {"predict_dataloaders": trainer.predict_loop},
    }[TrainerFn(trainer.state.fn.value)]
    given = {name: loop._data_source.instance for name, loop in loops.items()}
    given = {name: value for name, value in given.items() if value is not module}
    for value in given.values():
        if isinstance(value, L.LightningDataModule) or is_older(value):
            return GivenData(value)
    return GivenData(loaders=given)


def put_in_place(trainer: Any, module: L.LightningModule, data: Any, **loaders: Any) -> None:
    """Let the call under way continue with another module and other data, as if they had been given.

    It is made when the Trainer has connected the module that it was given and attached its callbacks, and has not yet
    called ``prepare_data`` or ``setup`` of anything.
    """
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, datamodule=data, **loaders)
    trainer._callback_connector._attach_model_callbacks()


def attach_logging(trainer: Any) -> None:
    """Give all callbacks the ``log`` of the module that was put in place, not of the one that was given."""
    trainer._callback_connector._attach_model_logging_functions()
