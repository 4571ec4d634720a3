"""Callbacks inside local fits: those that are given for them, and Lightning's that belong there."""

import logging
import pickle
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import assert_same, quiet_trainer
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from pfl_lightning import FederatedLoop, RayEngine, SequentialEngine, TrainerEngine, federate
from pfl_lightning.drop_in.outer.handed_in import sort_callbacks
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg


class Batches(L.Callback):
    """Sees batches of the user's data; its copies see them together."""

    seen: dict[str, list[Any]]

    def __init__(self) -> None:
        self.steps = 0

    def note(self, hook: str, batch: Any) -> None:
        type(self).seen.setdefault(hook, []).append([part.shape for part in batch])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        assert self.steps == batch_idx + 1  # it starts again
        assert type(pl_module) is Net
        self.note("train", batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert pl_module.fc.weight.grad is not None
        type(self).seen.setdefault("step", []).append(1)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        self.note("validation", batch)
        self.log("seen", 3.0)


def test_local_callbacks_see_the_batches_of_every_client():
    Batches.seen, given = {}, Batches()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*a batch is a client.*")
        _, trainer = run_project(FedAvg, 2, num_clients=2, cohorts=[[0, 1]] * 2, local_callbacks=[given])
    seen = Batches.seen
    assert given.steps == 0
    assert len(seen["train"]) == len(seen["step"]) > 4
    assert all(inputs[1:] == (6,) and len(classes) == 1 for inputs, classes in seen["train"])
    assert len(seen["validation"]) >= 2 * 2
    assert float(trainer.callback_metrics["seen"]) == 3.0


class Counting(L.Callback):
    """Means batches."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        pass

    def on_test_batch_start(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_a_callback_that_would_take_clients_for_batches_is_warned_of():
    federation, data = federate(Net(), Data(), FedAvg, num_clients=2, seed=1, head="fc")
    trainer = quiet_trainer(1, Counting(), L.Callback(), LambdaCallback(on_before_backward=lambda *args: None))
    expected = r"Counting \(on_train_batch_end, on_test_batch_start\); LambdaCallback \(on_before_backward\): in"
    with pytest.warns(UserWarning, match=expected) as said:
        trainer.fit(federation, datamodule=data)
    assert sum("local_callbacks" in str(warning.message) for warning in said) == 1


def test_callbacks_of_lightning_stay_outside_without_a_word(tmp_path):
    federation, data = federate(Net(), Data(), FedAvg, num_clients=2, seed=1)
    given = [ModelCheckpoint(tmp_path), EarlyStopping("val_loss"), TQDMProgressBar()]
    trainer = quiet_trainer(1, *given, enable_checkpointing=True, enable_progress_bar=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*a batch is a client.*")
        trainer.fit(federation, datamodule=data)
    assert all(callback in trainer.callbacks for callback in given)


RESTART: dict[str, Any] = {"schedule": "restart"}
"""By which local fits count their epochs from 0."""


class WithBackbone(Net):
    """Has what callbacks look for."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.body


def fitted(given: Any = (), **options: Any) -> Any:
    federation, data = federate(
        WithBackbone(), Data(), FedAvg, num_clients=2, seed=1, epochs=3, head="fc", **RESTART, **options
    )
    trainer = quiet_trainer(1, *given)
    trainer.fit(federation, datamodule=data)
    return federation.global_model().state_dict(), trainer


def pruning() -> L.Callback:
    return ModelPruning("l1_unstructured", amount=0.5)


INSIDE = [pruning(), BackboneFinetuning(unfreeze_backbone_at_epoch=1)]
if hasattr(callbacks, "EMAWeightAveraging"):  # of newer versions
    INSIDE.append(callbacks.EMAWeightAveraging())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("callback", INSIDE, ids=lambda callback: type(callback).__name__)
def test_lightning_s_callbacks_of_models_are_handed_in(callback, caplog):
    plain, _ = fitted()
    with caplog.at_level(logging.INFO, "pfl_lightning"):
        handed, trainer = fitted([callback])
    local, _ = fitted(local_callbacks=[callback])
    by_engine, _ = fitted(engine=TrainerEngine(callbacks=[callback]))
    assert not torch.equal(handed["fc.weight"], plain["fc.weight"])
    assert torch.equal(handed["fc.weight"], local["fc.weight"])
    assert torch.equal(handed["fc.weight"], by_engine["fc.weight"])
    assert callback in trainer.callbacks  # given back
    assert f"{type(callback).__name__}: runs inside local fits" in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_a_second_fit_hands_them_in_again_and_a_test_does_not_run_them():
    federation, data = federate(Net(), Data(), FedAvg, num_clients=2, seed=1, epochs=2, head="fc", **RESTART)
    trainer = quiet_trainer(1, pruning())
    for _ in range(2):
        trainer.fit(federation, datamodule=data)
        assert len(federation.local.moved) == 1
    trainer.test(federation, datamodule=data, verbose=False)
    assert sum(isinstance(callback, ModelPruning) for callback in trainer.callbacks) == 1


def test_a_module_may_configure_one():
    class Averaging(WithBackbone):
        def configure_callbacks(self) -> Any:
            return [pruning(), EarlyStopping("val_loss")]

    federation, data = federate(Averaging(), Data(), FedAvg, num_clients=2, seed=1, epochs=2, head="fc", **RESTART)
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    assert len(federation.local.moved) == 1
    assert any(isinstance(callback, EarlyStopping) for callback in trainer.callbacks)


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_averaging_over_epochs_is_refused(place):
    averaging = StochasticWeightAveraging(0.01)
    with pytest.raises(ConfigurationError, match="use EMAWeightAveraging"):
        fitted([averaging]) if place == "outside" else fitted(local_callbacks=[averaging])


def test_learning_rates_are_logged_by_round(tmp_path):
    class Stepping(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    for interval in ("epoch", "step"):
        federation, data = federate(Stepping(), Data(), FedAvg, num_clients=2, seed=1, epochs=2, head="fc", **RESTART)
        trainer = quiet_trainer(2, LearningRateMonitor(interval), logger=CSVLogger(tmp_path))
        trainer.fit(federation, datamodule=data)
        assert float(trainer.callback_metrics["lr-SGD"]) == pytest.approx(0.025)
        names = (tmp_path / f"lightning_logs/version_{trainer.logger.version}/metrics.csv").read_text().split("\n")[0]
        assert "lr-SGD" in names.split(",")
        assert "client_" not in names


def test_worker_processes_get_the_callbacks():
    federation, _ = run_project(FedAvg, num_clients=2, cohorts=[[0]], local_callbacks=[Counting()], head="fc")
    other = pickle.loads(pickle.dumps(federation.clients.models[0]))
    assert [type(callback) for callback in other.user_module.local.given] == [Counting]
    assert other.user_module.local.outer.trainer is None


def test_callbacks_of_the_older_package_run_inside():
    older = pytest.importorskip("pytorch_lightning")

    class Older(older.Callback):
        seen = 0

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert len(batch) == 2
            Older.seen += 1
            self.log("older", 2.0)

    given = [Older(), older.callbacks.ModelPruning("l1_unstructured", amount=0.5)]
    _, trainer = run_project(FedAvg, num_clients=2, cohorts=[[0, 1]], local_callbacks=given, head="fc")
    assert Older.seen > 2
    assert float(trainer.callback_metrics["older"]) == 2.0


WRONG = [
    (ModelCheckpoint(), TrainerEngine(), "inside local fits, .* nothing to do: .*outer Trainer's callbacks"),
    (Batches(), SequentialEngine(), "Batches runs inside local fits, and this engine has no Trainer there: use Trai"),
    (Batches(), RayEngine(), "use TrainerEngine"),
    (Net(), TrainerEngine(), "must be Lightning callbacks"),
]


@pytest.mark.parametrize(("callback", "engine", "message"), WRONG, ids=lambda value: type(value).__name__)
def test_what_cannot_run_inside_is_refused(callback, engine, message):
    with pytest.raises(ConfigurationError, match=message):
        federate(Net(), Data(), FedAvg, num_clients=2, engine=engine, local_callbacks=[callback], head="fc")


def test_a_callback_that_cannot_be_copied_is_refused():
    class Open(L.Callback):
        def __init__(self, path: Any) -> None:
            self.file = open(path, "w")  # noqa: SIM115

    with pytest.raises(ConfigurationError, match=r"own copy of Open: make what cannot be copied \(cannot pickle"):
        federate(Net(), Data(), FedAvg, num_clients=2, local_callbacks=[Open("/dev/null")], head="fc")


def test_without_inner_trainers_they_are_refused_outside():
    federation, data = federate(Net(), Data(), FedAvg, num_clients=2, engine=SequentialEngine(), head="fc")
    with pytest.raises(ConfigurationError, match=r"ModelPruning runs inside .*use TrainerEngine"):
        quiet_trainer(1, pruning()).fit(federation, datamodule=data)


class Shifting(L.Callback):
    """Changes batches, of training and of evaluations, as a pre-processor that a module brings does."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batch[0].add_(1.0)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *args: Any) -> None:
        batch[0].add_(1.0)


class Preprocessed(Net):
    def configure_callbacks(self) -> Any:
        return [Shifting()]


class Shifted(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch[0] + 1.0, batch[1]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step((batch[0] + 1.0, batch[1]), batch_idx)


def test_callbacks_of_the_module_that_see_batches_run_inside():
    expected, wanted = run_project(FedAvg, 2, module=Shifted())
    found, trainer = run_project(FedAvg, 2, module=Preprocessed())
    assert_same(dict(found.global_model().state_dict()), dict(expected.global_model().state_dict()), atol=0.0)
    assert trainer.callback_metrics["val_loss"] == wanted.callback_metrics["val_loss"]


class Beside(L.Callback):
    """Trains a classifier beside the module, which it adds when the fit begins."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.beside = nn.Linear(6, 5)


def test_layers_that_a_callback_adds_are_refused():
    with pytest.raises(ConfigurationError, match=r"Net has beside\.\w+ after its first local fit and did not have it"):
        run_project(FedAvg, num_clients=2, local_callbacks=[Beside()], head="fc")


class NeedsAFit(Batches):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn != "fit" or any(isinstance(each, FederatedLoop) for each in trainer.callbacks):
            raise RuntimeError("no local fit has begun")


def test_a_callback_that_needs_a_fit_is_not_shown_evaluations_as_one():
    Batches.seen = {}
    _, trainer = run_project(FedAvg, num_clients=2, cohorts=[[0, 1]], local_callbacks=[NeedsAFit()], head="fc")
    assert float(trainer.callback_metrics["seen"]) == 3.0


@pytest.mark.parametrize(("given", "times"), [({"every_n_train_steps": 4}, 1), ({"every_n_epochs": 1}, 0), ({}, 0)])
def test_a_checkpoint_by_steps_is_named(given, times, recwarn):
    sort_callbacks([ModelCheckpoint(save_top_k=-1, **given)], True)
    said = [str(one.message) for one in recwarn if "ModelCheckpoint (every_n_train_steps): in" in str(one.message)]
    assert len(said) == times


class SeesPairs(L.Callback):
    """Counts batches, which are inputs and classes."""

    seen = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert len(batch) == 2
        SeesPairs.seen += 1


class Keeps(Net):
    """Keeps the callbacks that it configures."""

    def configure_callbacks(self) -> Any:
        self.stopping = L.pytorch.callbacks.EarlyStopping("train/loss", patience=9)
        return [SeesPairs(), self.stopping]


@pytest.mark.filterwarnings("error:.*changes made")
def test_callbacks_that_a_module_configures_are_there_once():
    """Under the callback form the Trainer has called ``configure_callbacks`` of the module itself before."""
    module, loop = Keeps(), FederatedLoop(method=FedAvg, num_clients=2, seed=1)
    trainer = quiet_trainer(2, loop, SeesPairs())
    for _ in range(2):
        SeesPairs.seen = 0
        trainer.fit(module, Data())
    trainer.test(module, Data(), verbose=False)
    assert SeesPairs.seen == 0  # the second fit had all its rounds already
    assert [type(each).__name__ for each in trainer.callbacks].count("EarlyStopping") == 1
    trainer = quiet_trainer(1, FederatedLoop(method=FedAvg, num_clients=2, seed=1))
    trainer.fit(Keeps(), Data())
    assert SeesPairs.seen > 2
