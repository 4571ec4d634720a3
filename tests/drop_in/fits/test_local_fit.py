"""Local fits validate on the client's own validation part where something watches what only a validation logs."""

import logging
import pickle
from typing import Any, ClassVar

import pytest
import torch
from _helpers.plain import RoundsAsEpochs, named
from _helpers.project import Data, Net, run_project
from _helpers.toy import Toy, assert_same, quiet_trainer
from lightning.pytorch.callbacks import EarlyStopping

from pfl_lightning import SequentialEngine, TrainerEngine
from pfl_lightning.drop_in.fits.loggers import OuterRun
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, LocalOnly

ROUNDS = 4


class Plateau(Net):
    """A rate that falls with the validation loss; notes how often it was validated while it trains."""

    validated: ClassVar[list[int]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.state.fn == "fit":
            self.validated.append(len(batch[1]))
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class ByHand(Plateau):
    """The same with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step(self.trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("module", [Plateau, ByHand])
def test_a_plateau_of_the_validation_loss_is_that_of_a_plain_run(module, monkeypatch):
    monkeypatch.setattr(Plateau, "validated", [])
    federation, trainer = run_project(
        FedAvg, ROUNDS, module=module(), cohorts=[[0]], optimizer_state="keep", trainer={"limit_val_batches": 0}
    )
    assert Plateau.validated == [5] * ROUNDS
    own, plain = trainer.datamodule.client_data(0).validation.loader(7), module()
    quiet_trainer(ROUNDS).fit(plain, train_dataloaders=RoundsAsEpochs(Toy(), 0, ROUNDS), val_dataloaders=own)
    assert_same(named(federation.global_model()), named(plain))
    rates = [plain.trainer.optimizers[0].param_groups[0]["lr"]]
    assert rates[0] < 0.2  # there was something to compare


def test_values_of_an_inner_validation_are_not_those_of_the_training(monkeypatch):
    _, trainer = run_project(FedAvg, 1, module=Plateau(), trainer={"limit_val_batches": 0})
    assert "train_loss" in trainer.callback_metrics
    assert "val_loss" not in trainer.callback_metrics


def test_nothing_is_validated_that_nobody_watches(monkeypatch):
    class ByTraining(Plateau):
        def configure_optimizers(self):
            configured = super().configure_optimizers()
            configured["lr_scheduler"]["monitor"] = "train_loss"
            return configured

    monkeypatch.setattr(Plateau, "validated", [])
    run_project(FedAvg, 1, module=ByTraining(), trainer={"limit_val_batches": 0})
    assert Plateau.validated == []


class Frequent(Plateau):
    """Lets its schedule have the frequency of the validations, or another one."""

    frequency: ClassVar[int | None] = None
    rates: ClassVar[list[float]] = []

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        configured["lr_scheduler"]["scheduler"].threshold = 100.0  # no value is good enough
        configured["lr_scheduler"]["frequency"] = self.frequency or self.trainer.check_val_every_n_epoch
        return configured

    def on_train_epoch_start(self) -> None:
        assert self.trainer.check_val_every_n_epoch == 2
        self.rates.append(self.optimizers().param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("frequency", "rates", "times"),
    [
        (None, [0.2, 0.2, 0.1, 0.1, 0.05, 0.05], 3),
        (2, [0.2, 0.2, 0.1, 0.1, 0.05, 0.05], 3),
        (1, [0.2 / 2**n for n in range(6)], 6),
    ],
)
def test_the_frequency_of_validations_is_that_of_the_outer_trainer(frequency, rates, times, monkeypatch):
    monkeypatch.setattr(Plateau, "validated", [])
    monkeypatch.setattr(Frequent, "rates", [])
    monkeypatch.setattr(Frequent, "frequency", frequency)
    run_project(FedAvg, 6, module=Frequent(), cohorts=[[0]], trainer={"check_val_every_n_epoch": 2})
    assert Frequent.rates == pytest.approx(rates)
    assert Plateau.validated == [5] * times


def test_another_process_knows_the_frequency():
    outer = OuterRun()
    outer.trainer = quiet_trainer(1, check_val_every_n_epoch=3)
    sent = pickle.loads(pickle.dumps(outer))
    assert sent.trainer is None
    assert sent.validates_every == outer.validates_every == 3
    assert OuterRun().validates_every == 1


def test_early_stopping_inside_local_fits_sees_the_validation(monkeypatch):
    class Fitting(Net):
        seen: ClassVar[list[int]] = []

        def on_train_epoch_start(self):
            self.seen.append(self.current_epoch)

    stopping = EarlyStopping("val_loss", min_delta=100.0, patience=2)
    run_project(LocalOnly, 1, module=Fitting(), engine=TrainerEngine(callbacks=[stopping]), cohorts=[[0]], epochs=6)
    assert Fitting.seen == [0, 1, 2]


class SteppedInValidation(ByHand):
    """Steps its schedule in a hook of the validation, by a function of its own."""

    rates: ClassVar[list[float]] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def on_train_epoch_end(self) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def on_validation_epoch_end(self) -> None:
        self._step_schedule()

    def _step_schedule(self) -> None:
        if self.trainer.state.fn == "fit":
            self.lr_schedulers().step()


def test_a_schedule_that_is_stepped_in_the_validation_moves(monkeypatch, caplog):
    monkeypatch.setattr(SteppedInValidation, "rates", [])
    run_project(FedAvg, 3, module=SteppedInValidation(), cohorts=[[0]] * 3)
    assert SteppedInValidation.rates == pytest.approx([0.02, 0.002, 0.0002])  # after the validations
    data = Data(Toy(validation=[0, 5, 5, 5, 5]))
    run_project(FedAvg, 1, module=SteppedInValidation(), data=data, cohorts=[[0]])
    assert "client 0 has no validation part: what watches a value of the validation" in caplog.text


def test_a_client_without_validation_part_leaves_its_schedule_and_says_so(caplog):
    data = Data(Toy(validation=[0, 5, 5, 5, 5]))
    with caplog.at_level(logging.WARNING, logger="pfl_lightning"):
        run_project(FedAvg, 1, module=Plateau(), data=data, trainer={"limit_val_batches": 0})
    assert "client 0 has no validation part: what watches val_loss in its local fits" in caplog.text
    assert "client 1" not in caplog.text


def test_the_plain_loop_says_which_engine_validates():
    with pytest.raises(ConfigurationError, match="ReduceLROnPlateau and other frequencies need TrainerEngine"):
        run_project(FedAvg, module=Plateau(), engine=SequentialEngine())
