"""Accuracies are asked for where a project tells nothing of itself, and never end a run."""

from __future__ import annotations

import math
import warnings
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import assert_same, quiet_trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.nn import functional as F

from pfl_lightning import FederatedLoop, SequentialEngine, TrainerEngine
from pfl_lightning.drop_in.fits.local_evaluation import ClassScores
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


def test_a_head_with_more_outputs_than_classes_is_told_why_there_is_no_accuracy():
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(self.fc.in_features, self.fc.out_features + 2)

    wide = Wide()
    with pytest.warns(UserWarning, match="no accuracy is computed: forward gives") as found:
        _, trainer = run_project(FedAvg, module=wide)
    said = [str(warning.message) for warning in found if "no accuracy" in str(warning.message)]
    assert len(said) == 1
    assert (
        f"{wide.fc.out_features} numbers for each item, but the data have {wide.fc.out_features - 2} classes" in said[0]
    )
    assert "val_accuracy/mean" not in trainer.callback_metrics

    class Named(Data):
        def train_dataloader(self) -> Any:
            loader = super().train_dataloader()
            loader.dataset.classes = [f"class {number}" for number in range(wide.fc.out_features)]
            return loader

    _, trainer = run_project(FedAvg, module=Wide(), data=Named())
    assert 0 <= float(trainer.callback_metrics["val_accuracy/mean"]) <= 1


def test_steps_of_evaluations_that_ask_for_optimizers_get_new_ones(caplog):
    class Asking(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("rate", self.optimizers().param_groups[0]["lr"])
            super().validation_step(batch, batch_idx)

    expected, _ = run_project(FedAvg, engine=TrainerEngine())
    asking, trainer = run_project(FedAvg, module=Asking(), engine=TrainerEngine())
    assert float(trainer.callback_metrics["rate"]) == pytest.approx(0.05)
    assert_same(asking.global_model().state_dict(), expected.global_model().state_dict(), atol=0)
    said = [message for message in caplog.messages if "Asking asks for its optimizers or schedulers" in message]
    assert len(said) == 1


def test_hooks_of_evaluations_find_schedulers_and_the_optimizers_of_the_trainer(caplog):
    class AskingForAll(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.25)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

        def on_validation_epoch_end(self) -> None:
            self.log("rate", self.lr_schedulers().get_last_lr()[0])

        def on_test_epoch_end(self) -> None:
            self.log("test_rate", self.trainer.optimizers[0].param_groups[0]["lr"])
            self.log("test_schedules", float(len(self.trainer.lr_scheduler_configs)))

    _, trainer = run_project(FedAvg, module=AskingForAll(), engine=TrainerEngine())
    found = {name: float(trainer.callback_metrics[name]) for name in ("rate", "test_rate", "test_schedules")}
    assert found == {"rate": 0.25, "test_rate": 0.25, "test_schedules": 1.0}
    assert len([message for message in caplog.messages if "AskingForAll asks for its optimizers" in message]) == 1


def test_the_note_of_an_error_fits_it():
    class Broken(Net):
        error = AttributeError("'NoneType' object has no attribute 'x'")

        def on_validation_epoch_end(self) -> None:
            raise self.error

    for error, expected, other in (
        (Broken.error, "if self.trainer lacks something", "shared_evaluation"),
        (ValueError("too few"), "Only if they need a whole validation", "self.trainer"),
    ):
        Broken.error = error
        with pytest.raises(type(error)) as caught:
            run_project(FedAvg, module=Broken(), engine=TrainerEngine())
        notes = " ".join(caught.value.__notes__)
        assert expected in notes
        assert other not in notes


def test_hooks_find_the_callbacks_of_the_outer_trainer(tmp_path):
    class Looking(Net):
        found: ClassVar[set[Any]] = set()

        def on_test_epoch_end(self) -> None:
            self.found.add(("test", self.trainer.checkpoint_callback, self.trainer.early_stopping_callback))

        def on_train_epoch_start(self) -> None:
            self.found.add(("fit", self.trainer.checkpoint_callback, self.trainer.early_stopping_callback))

    stopping, saving = EarlyStopping("val_loss", patience=3), ModelCheckpoint(tmp_path)
    loop = FederatedLoop(method=FedAvg, num_clients=2, seed=0)
    trainer, module = quiet_trainer(1, stopping, saving, loop, enable_checkpointing=True), Looking()
    trainer.fit(module, Data())
    trainer.test(module, Data(), verbose=False)
    assert Looking.found == {("fit", saving, stopping), ("test", saving, stopping)}
    inner = EarlyStopping("train_loss", patience=5)
    Looking.found.clear()
    run_project(FedAvg, module=Looking(), engine=TrainerEngine(), local_callbacks=[inner])
    (fit,) = {found[2].monitor for found in Looking.found if found[0] == "fit"}
    assert fit == "train_loss"


def test_that_nothing_is_known_is_said_once():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run_project(FedAvg, 2, module=NoSteps(), data=Shifting(), engine=TrainerEngine())
    assert len([each for each in said if "logs nothing in its validation" in str(each.message)]) == 1


class Colliding(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_accuracy/mean", 100 * F.cross_entropy(self(batch[0]), batch[1]))
        self.log("val_loss/mean", F.cross_entropy(self(batch[0]), batch[1]))


def test_a_value_that_the_accuracies_replace_is_named_once():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, trainer = run_project(FedAvg, 2, module=Colliding())
    found = [str(each.message) for each in said if "accuracies over clients replace: rename it" in str(each.message)]
    assert len(found) == 1
    assert "Colliding logs 'val_accuracy/mean', which" in found[0]
    assert 0 <= float(trainer.callback_metrics["val_accuracy/mean"]) <= 1
