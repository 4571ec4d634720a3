"""Accuracies are asked for where a project tells nothing of itself, and never end a run."""

from __future__ import annotations

import math
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import assert_same
from torch import nn
from torch.nn import functional as F

from pfl_lightning import SequentialEngine, TrainerEngine
from pfl_lightning.drop_in.fits.module_evaluation import ClassScores
from pfl_lightning.methods import FedAvg

ENGINES = pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])


class NoForward(L.LightningModule):
    """Has no forward and no step of an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NoForwardLogs(NoForward):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


class NoForwardSilent(NoForward):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


class Generator(NoForwardSilent):
    """Its forward takes noise of another size, and counts its calls."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.generate = nn.Linear(17, 6)

    def forward(self, noise: Any) -> Any:
        type(self).calls += 1
        return self.generate(noise)


class GeneratorLogs(Generator):
    """Its only metric is logged when all batches have been seen."""

    calls = 0

    def on_validation_epoch_end(self) -> None:
        self.log("quality", 0.5)


@ENGINES
@pytest.mark.parametrize("module", [NoForward, NoForwardLogs, NoForwardSilent, Generator, GeneratorLogs])
def test_a_module_without_a_forward_for_its_batches_runs(module, engine):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*logs nothing in its validation or test step.*")
        federation, trainer = run_project(FedAvg, module=module(), engine=engine())
    assert all(math.isnan(score.accuracy) for score in federation.test_scores.values())
    assert not [name for name in trainer.callback_metrics if "accuracy" in name]


@ENGINES
def test_a_module_with_a_metric_of_its_own_is_not_asked_for_more(engine):
    GeneratorLogs.calls = 0
    _, trainer = run_project(FedAvg, module=GeneratorLogs(), engine=engine())
    assert GeneratorLogs.calls == 0
    assert float(trainer.callback_metrics["test_quality"]) == 0.5


@ENGINES
def test_steps_that_tell_nothing_are_judged_by_forward(engine):
    class Mute(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.fc(self.body(batch[0]))

        test_step = validation_step

    expected, _ = run_project(FedAvg, engine=engine())
    mute, _ = run_project(FedAvg, module=Mute(), engine=engine())
    assert [s.accuracy for s in mute.test_scores.values()] == [s.accuracy for s in expected.test_scores.values()]


class NoSteps(Net):
    """Has no steps of evaluations of its own."""

    validation_step = L.LightningModule.validation_step
    test_step = L.LightningModule.test_step


class Shifting(Data):
    """Changes batches in a hook."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 100, batch[1]


def test_batches_that_hooks_change_are_not_judged_without_them():
    with pytest.warns(UserWarning, match="logs nothing in its validation or test step"):
        federation, _ = run_project(FedAvg, module=NoSteps(), data=Shifting(), engine=TrainerEngine())
    assert all(math.isnan(score.accuracy) for score in federation.test_scores.values())


def test_descriptors_of_numbered_items_are_no_class_scores():
    scores = ClassScores(nn.Identity(), 0)
    for numbers in (torch.arange(4), torch.arange(4, 8)):
        scores._keep(nn.Identity(), (), torch.rand(4, 6))
        scores.see((torch.rand(4, 6), numbers))
    assert math.isnan(scores.accuracy)


def test_steps_of_evaluations_that_ask_for_optimizers_get_new_ones(caplog):
    class Asking(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("rate", self.optimizers().param_groups[0]["lr"])
            super().validation_step(batch, batch_idx)

    expected, _ = run_project(FedAvg, engine=TrainerEngine())
    asking, trainer = run_project(FedAvg, module=Asking(), engine=TrainerEngine())
    assert float(trainer.callback_metrics["rate"]) == pytest.approx(0.05)
    assert_same(asking.global_model().state_dict(), expected.global_model().state_dict(), atol=0)
    said = [message for message in caplog.messages if "Asking asks for self.optimizers() in an evaluation" in message]
    assert len(said) == 1


def test_that_nothing_is_known_is_said_once():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run_project(FedAvg, 2, module=NoSteps(), data=Shifting(), engine=TrainerEngine())
    assert len([each for each in said if "logs nothing in its validation" in str(each.message)]) == 1
