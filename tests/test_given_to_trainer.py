"""What the callback form relies on in Lightning, point by point: a new version of Lightning is tried with these."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from _helpers.project import Data, Net
from _helpers.toy import quiet_trainer
from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.lightning_private import GivenData, attach_logging, data_given_to, put_in_place, trainer_of

EVENTS: list[str] = []


class Watched(Data):
    def prepare_data(self) -> None:
        EVENTS.append("prepare_data")

    def setup(self, stage: str) -> None:
        EVENTS.append(f"setup {TrainerFn(stage).value}")
        super().setup(stage)

    def val_dataloader(self) -> Any:
        return self.test_dataloader()

    predict_dataloader = val_dataloader


class Sees(L.Callback):
    """Takes the assignment of ``log``, and lets the call go on with others, if it is given some."""

    def __init__(self, *others: Any) -> None:
        self.others, self.given, self.modules = others, [], []

    @property
    def log(self) -> Any:
        return self._log

    @log.setter
    def log(self, log: Any) -> None:
        self._log = log
        trainer = trainer_of(log)
        EVENTS.append("log")
        self.given.append(data_given_to(trainer, trainer.lightning_module))
        if self.others and trainer.lightning_module is not self.others[0]:
            put_in_place(trainer, *self.others)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        attach_logging(trainer)
        self.modules.append(pl_module)
        EVENTS.append("setup of the callback")


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_log_is_assigned_before_anything_is_set_up(name):
    EVENTS.clear()
    sees, data = Sees(), Watched()
    module = Net()
    module.predict_step = lambda batch, batch_idx: module(batch[0])
    getattr(quiet_trainer(1, sees), name)(module, datamodule=data)
    assert EVENTS[0] == "log"
    assert EVENTS.index("prepare_data") < EVENTS.index(f"setup {name}") < EVENTS.index("setup of the callback")
    assert sees.given[0].datamodule is data


def test_loaders_are_known_by_the_names_of_fit():
    data = Watched()
    data.setup("fit")
    train, test = data.train_dataloader(), data.test_dataloader()
    sees, module = Sees(), Net()
    trainer = quiet_trainer(1, sees)
    trainer.fit(module, train, test)
    trainer.test(module, test)
    trainer.validate(module, datamodule=data)
    trainer.test(module, test)  # the Trainer still has the data module
    loaders = {"train_dataloaders": train, "val_dataloaders": test}, {"test_dataloaders": test}
    fitted, tested, validated, last = sees.given[0], *(given for given in sees.given[2::2])
    assert [fitted.loaders, tested.loaders, last.loaders] == [*loaders, loaders[1]]
    assert validated.datamodule is data
    assert GivenData(loaders={"val_dataloaders": test}).is_part_of(fitted)
    assert not tested.is_part_of(fitted)
    assert tested.is_for_evaluation
    assert not fitted.is_for_evaluation


def test_the_call_goes_on_with_what_is_put_in_place():
    class Stops(Net):
        def configure_callbacks(self) -> Any:
            return [L.pytorch.callbacks.EarlyStopping("train_loss")]

    other, data, before, after = Stops(), Watched(), Sees(), Sees()
    sees = Sees(other, data)
    given = Watched()
    EVENTS.clear()
    trainer = quiet_trainer(1, before, sees, after)
    trainer.fit(Net(), datamodule=given)
    assert EVENTS.count("prepare_data") == EVENTS.count("setup fit") == 1
    assert trainer.lightning_module is other
    assert trainer.datamodule is data
    assert not hasattr(given, "samples")
    assert before.modules == sees.modules == after.modules == [other]
    assert {callback.log.__self__ for callback in (before, sees, after)} == {other}
    assert any(isinstance(callback, L.pytorch.callbacks.EarlyStopping) for callback in trainer.callbacks)
