"""Each private name of Lightning that is used: what there is of it in the version in use, and what it does."""

import signal
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import Data, Net
from _helpers.toy import quiet_trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from pfl_lightning import lightning_private as private


class Asking(L.Callback):
    """Asks when a fit ends, and writes a value as a LearningRateMonitor does."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.callback_metrics["rate"] = 1.0

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.found = private.callback_values(trainer), private.values_for_loggers(trainer)


def test_a_module_has_a_trainer_for_a_time():
    module, trainer = Net(), quiet_trainer(1)
    assert private.trainer_or_none(module) is None
    assert not private.has_trainer(module)
    with private.attached(module, trainer):
        assert private.trainer_or_none(module) is module.trainer is trainer
        assert private.has_trainer(module)
    assert private.trainer_or_none(module) is None


def test_what_configure_optimizers_may_return():
    module = Net()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    halving, cosine = StepLR(sgd, 1), CosineAnnealingLR(sgd, 5)
    assert private.configured(sgd) == ([sgd], [])
    for returned in ({"optimizer": sgd, "lr_scheduler": halving}, ([sgd], [halving])):
        optimizers, (config,) = private.configured(returned)
        assert optimizers == [sgd]
        assert (config.scheduler, config.interval, config.frequency) == (halving, "epoch", 1)
    _, (config,) = private.configured({"optimizer": sgd, "lr_scheduler": {"scheduler": cosine, "interval": "step"}})
    assert config.interval == "step"
    with pytest.raises(MisconfigurationException, match="interval"):
        private.configured({"optimizer": sgd, "lr_scheduler": {"scheduler": cosine, "interval": "round"}})


def test_hyper_parameters_are_those_that_loggers_get():
    class Named(Net):
        def __init__(self, width: int = 3, log: bool = True) -> None:
            super().__init__()
            self.save_hyperparameters("width", logger=log)

    assert private.hyperparameters_of(Net()) is None
    assert private.hyperparameters_of(None) is None
    assert dict(private.hyperparameters_of(Named())) == {"width": 3}
    assert private.hyperparameters_of(Named(log=False)) is None
    assert private.name_of_hyperparameters(Named()) == "kwargs"
    assert vars(Named()).keys() >= private.HYPERPARAMETERS
    assert private.name_of_hyperparameters(Net()) is None


def test_values_are_logged_under_the_steps_that_a_trainer_has_taken(tmp_path):
    asking = Asking()
    trainer = quiet_trainer(2, asking, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    trainer.fit(Net(), datamodule=Data())
    assert private.batches_that_stepped(trainer) == trainer.global_step > 0
    private.set_batches_that_stepped(trainer, 7)
    assert private.batches_that_stepped(trainer) == 7
    for_callbacks, for_loggers = asking.found
    assert {"train_loss", "rate"} <= for_callbacks
    assert "train_loss" in for_loggers
    assert "rate" not in for_loggers


class Putting(L.Callback):
    """Puts values in the place of ``log``, and sees what is left of them at the end of the epoch."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        private.put_values(trainer, {"accuracy": 0.1, "clients": 3}, {"accuracy"})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.found = {name: trainer.callback_metrics[name] for name in ("accuracy", "clients")}
        self.in_bar = {name: value for name, value in trainer.progress_bar_metrics.items() if name in self.found}


def test_values_are_put_where_those_that_are_logged_are():
    putting = Putting()
    quiet_trainer(1, putting).fit(Net(), datamodule=Data())
    assert putting.found == {"accuracy": torch.tensor(0.1), "clients": torch.tensor(3.0)}
    assert {value.dtype for value in putting.found.values()} == {torch.float32}
    assert putting.in_bar == {"accuracy": float(torch.tensor(0.1))}


def test_options_of_a_trainer():
    trainer, timed = quiet_trainer(1), quiet_trainer(1, val_check_interval={"minutes": 2})
    private.put_root_dir(trainer, "/elsewhere")
    assert trainer.default_root_dir == "/elsewhere"
    assert private.seconds_between_validations(trainer) is None
    assert private.seconds_between_validations(timed) == 120


def test_fewer_handlers_of_signals_are_put_back():
    trainer = quiet_trainer(1)
    private.keep_fewer_signals(trainer)
    connector = trainer._signal_connector
    assert isinstance(connector._get_current_signal_handlers, partial)
    assert {signal.SIGINT, signal.SIGTERM} <= connector._get_current_signal_handlers().keys()
    assert len(connector._get_current_signal_handlers()) <= 5


def test_options_of_callbacks_and_loaders():
    by_step, by_epoch = Timer({"hours": 1}), Timer({"hours": 1}, interval="epoch")
    for timer in (by_step, by_epoch):
        private.end_after_epochs(timer)
        assert timer._interval == "epoch"
    assert private.steps_between_checkpoints(ModelCheckpoint(every_n_train_steps=5)) == 5
    assert private.steps_between_checkpoints(ModelCheckpoint()) == 0
    assert private.steps_between_checkpoints(Asking()) == 0
    assert private.combining_mode(CombinedLoader([], "min_size")) == "min_size"
