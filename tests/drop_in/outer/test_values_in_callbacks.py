"""What callbacks of the Trainer find in ``trainer.callback_metrics``, and when."""

from __future__ import annotations

from typing import Any

import lightning as L
from _helpers.project import Data, Net
from _helpers.toy import quiet_trainer

from pfl_lightning import FederatedLoop
from pfl_lightning.methods import FedAvg


class Collected(L.Callback):
    """Takes losses in the hooks in which scripts take them."""

    def __init__(self) -> None:
        self.train: list[float] = []
        self.validation: list[float] = []
        self.test: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.train.append(trainer.callback_metrics["train_loss"].item())

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.validation.append(trainer.callback_metrics["val_loss"].item())

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.test.append(trainer.callback_metrics["test_loss"].item())


class Validated(Data):
    def val_dataloader(self) -> Any:
        return self.test_dataloader()


def test_values_of_a_validation_are_there_at_its_end_as_in_a_plain_run():
    found, module, data = Collected(), Net(), Validated()
    trainer = quiet_trainer(2, found, FederatedLoop(method=FedAvg, num_clients=3), num_sanity_val_steps=2)
    trainer.fit(module, data)
    assert (len(found.train), len(found.validation)) == (2, 3)
    assert found.validation[-1] == trainer.callback_metrics["val_loss"].item() < found.validation[0]
    (tested,) = trainer.test(module, data, verbose=False)
    assert found.test == [tested["test_loss"]]
