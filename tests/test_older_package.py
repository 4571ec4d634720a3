"""Projects of the package pytorch_lightning are federated as those of lightning are, with the same results."""

from __future__ import annotations

import copy
import logging
import pickle
from abc import ABC, abstractmethod
from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import BATCH, SEED, Net, run_project
from _helpers.project import Data as NewData
from _helpers.toy import GivenCohorts, Toy, quiet_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from pfl_lightning import SequentialEngine, TrainerEngine, federate
from pfl_lightning.datamodules import FromLoaders
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import Ditto, FedAvg, FedPer, FedRep

pl = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning, the older package, is not installed")


class Old(pl.LightningModule):
    """The project's Net, under the older name."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        new = Net()
        self.body, self.fc = new.body, new.fc
        self.seen = MulticlassAccuracy(5, average="micro")
        self.epochs = 0

    def forward(self, inputs: Any) -> Any:
        return self.fc(self.body(inputs))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.epochs += 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen(self(batch[0]), batch[1])
        self.log_dict({"val_loss": F.cross_entropy(self(batch[0]), batch[1]), "val_seen": self.seen})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.5, weight_decay=5e-4)


class OldData(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.toy = Toy()

    def setup(self, stage: str) -> None:
        self.samples = self.toy.load()

    def train_dataloader(self) -> Any:
        train = TensorDataset(self.samples.train_inputs, self.samples.train_targets)
        return DataLoader(train, batch_size=BATCH, shuffle=True)

    def test_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.samples.test_inputs, self.samples.test_targets), batch_size=7)


class Inside(L.LightningModule):
    """A module of lightning with one of the older package in it, which asks for its Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Old()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.inner.trainer is not None
        return F.cross_entropy(self.inner(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.inner.configure_optimizers()


def older_trainer(rounds: int, *callbacks: Any, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return pl.Trainer(
        max_epochs=rounds, accelerator="cpu", callbacks=list(callbacks), **{"logger": False, **quiet, **options}
    )


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


ENGINES = pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])


@pytest.mark.repeated
@ENGINES
@pytest.mark.parametrize("method", [FedAvg, FedRep, Ditto])
def test_the_result_is_that_of_the_same_project_under_the_newer_name(method, engine):
    expected, plain = run_project(method, 2, engine=engine(), head="fc")
    module, data = Old(), OldData()
    federation, divided = federate(module, data, method, data.toy.partition, engine=engine(), head="fc", seed=SEED)
    trainer = older_trainer(2, GivenCohorts(range(5)))
    trainer.fit(federation, datamodule=divided)
    assert same_weights(module.fc, expected.global_model().fc)
    assert same_weights(module.body, expected.global_model().body)
    assert type(module) is type(federation.client_model(3)) is type(federation.global_model()) is Old
    assert same_weights(federation.client_model(3).fc, expected.client_model(3).fc)
    assert float(trainer.callback_metrics["train_loss"]) == float(plain.callback_metrics["train_loss"])
    (result,) = trainer.test(federation, datamodule=divided, verbose=False)
    assert result["test_loss"] == float(plain.callback_metrics["test_loss"])
    assert result["test_seen"] == pytest.approx(result["test_accuracy/mean"], abs=0.2)


def test_a_module_that_brings_its_loaders():
    class Bringing(Old):
        train_dataloader, test_dataloader = OldData.train_dataloader, OldData.test_dataloader

        def setup(self, stage: str) -> None:
            self.samples = Toy().load()

    models = []
    for module, data in ((Old(), OldData()), (Bringing(), None)):
        federation, data = federate(module, data, FedAvg, num_clients=2, seed=SEED)
        older_trainer(1).fit(federation, datamodule=data)
        models.append(federation.global_model())
    assert same_weights(*models)


def test_callbacks_loggers_and_a_resume_of_the_older_trainer(tmp_path):
    def run(rounds: int, **options: Any) -> Any:
        module, data = Old(), OldData()
        federation, data = federate(module, data, FedPer, data.toy.partition, head="fc", seed=SEED)
        best = pl.callbacks.ModelCheckpoint(tmp_path, monitor="train_loss", save_last=True)
        stop = pl.callbacks.EarlyStopping("train_loss", patience=50)
        logger = pl.loggers.CSVLogger(str(tmp_path))
        trainer = older_trainer(rounds, best, stop, enable_checkpointing=True, logger=logger)
        trainer.fit(federation, datamodule=data, **options)
        return module, best

    through, _ = run(2)
    _, best = run(1)
    resumed, _ = run(2, ckpt_path=best.last_model_path)
    assert same_weights(resumed, through)


def test_they_are_copied_and_pickled():
    federation, _ = federate(Old(), OldData(), FedAvg, num_clients=2)
    module = federation._parts.copied(federation.given_module)
    assert isinstance(module, L.LightningModule)
    assert isinstance(module, pl.LightningModule)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        assert same_weights(other, module)


def test_one_module_may_be_of_the_other_package():
    federation, data = federate(Old(), NewData(), FedAvg, num_clients=2, seed=SEED)
    older_trainer(1).fit(federation, datamodule=data)
    federation, data = federate(Inside(), NewData(), FedAvg, num_clients=2, seed=SEED)
    quiet_trainer(1).fit(federation, datamodule=data)
    assert type(federation.global_model().inner) is Old


def test_hooks_of_an_older_data_module_hold():
    class Shifting(OldData):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] * 0, batch[1]

    data = FromLoaders(Shifting().toy.partition, datamodule=Shifting())
    with pytest.raises(ConfigurationError, match="Shifting overrides on_after_batch_transfer"):
        quiet_trainer(1).fit(federate(Net(), data, FedAvg, engine=SequentialEngine())[0], datamodule=data)


def test_an_older_module_without_a_step_is_refused():
    class NoStep(pl.LightningModule):
        pass

    with pytest.raises(ConfigurationError, match="NoStep has no training_step"):
        federate(NoStep(), OldData(), FedAvg, num_clients=2)


def test_a_trainer_of_lightning_takes_an_older_project():
    found = []
    for trainer in (older_trainer(1), quiet_trainer(1)):
        module = Old()
        federation, data = federate(module, OldData(), FedAvg, num_clients=2, seed=SEED)
        trainer.fit(federation, datamodule=data)
        found.append(module)
    assert same_weights(*found)


def test_inner_trainers_are_silent_where_the_older_package_is_imported(caplog):
    federation, data = federate(Old(), OldData(), FedAvg, num_clients=2, seed=SEED)
    trainer = older_trainer(1)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        trainer.fit(federation, datamodule=data)
    assert "GPU available" not in caplog.text


def test_classes_with_a_metaclass():
    class Abstract(Old, ABC):
        @abstractmethod
        def answer(self) -> int: ...

    class Concrete(Abstract):
        def answer(self) -> int:
            return 42

    module = Concrete()
    federation, data = federate(module, OldData(), FedAvg, num_clients=2, seed=SEED)
    older_trainer(1).fit(federation, datamodule=data)
    assert federation.client_model(0).answer() == 42


def test_another_version_is_warned_of(monkeypatch):
    monkeypatch.setattr(pl, "__version__", "1.9.5")
    with pytest.warns(UserWarning, match=r"uses pytorch_lightning 1\.9, but lightning is .* Run pip install"):
        federate(Old(), OldData(), FedAvg, num_clients=2)
