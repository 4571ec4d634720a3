"""``FederatedLoop(method=...)`` in a project's own calls: the same federation as that of ``federate``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import SEED, Data, Net
from _helpers.toy import BATCH, Toy, assert_same, quiet_trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset, random_split

from pfl_lightning import FederatedLoop, TrainerEngine, federate
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation import Federation
from pfl_lightning.federation.preemption import Preemption
from pfl_lightning.methods import Ditto, FedAvg, FedPer, FedProx
from pfl_lightning.state.checkpoints import AtomicCheckpointIO


class Split(L.LightningDataModule):
    """Draws its validation set in ``setup`` by the global generator, as many projects do, and counts its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        samples = Toy().load()
        whole = TensorDataset(samples.train_inputs, samples.train_targets)
        self.train, self.val = random_split(whole, [70, len(whole) - 70])
        self.test = TensorDataset(samples.test_inputs, samples.test_targets)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, BATCH, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, 7)

    def test_dataloader(self) -> Any:
        return DataLoader(self.test, 7)


class Stepping(Net):
    """Rates that decay and a callback of the module's own."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss", patience=9)]


def loaders(samples: Any = None) -> dict[str, Any]:
    samples = Toy().load() if samples is None else samples
    train = TensorDataset(samples.train_inputs, samples.train_targets)
    test = TensorDataset(samples.test_inputs, samples.test_targets)
    return {
        "train_dataloaders": DataLoader(train, BATCH, shuffle=True),
        "val_dataloaders": DataLoader(test, 5),
        "test_dataloaders": DataLoader(test, 7),
    }


def saving_trainer(folder: Path, rounds: int, *callbacks: L.Callback) -> L.Trainer:
    best = ModelCheckpoint(folder, "best-{epoch}", monitor="val_loss")
    logger = CSVLogger(folder, "", "")
    return quiet_trainer(rounds, *callbacks, best, logger=logger, enable_checkpointing=True, log_every_n_steps=1)


OPTIONS = {"num_clients": 3, "head": "fc", "seed": SEED, "monitor": "val_loss"}


@pytest.mark.parametrize("method", [FedPer, Ditto])
def test_both_forms_give_the_same_results(tmp_path, method):
    results = []
    for form in ("call", "callback"):
        torch.manual_seed(1)
        module, data = Stepping(), Split()
        if form == "call":
            trained, given = federate(module, data, method, **OPTIONS)
            trainer = saving_trainer(tmp_path / form, 3, FederatedLoop(cohort=2))
        else:
            trained, given = module, data
            trainer = saving_trainer(tmp_path / form, 3, FederatedLoop(cohort=2, method=method, **OPTIONS))
        trainer.validate(trained, given)
        trainer.fit(trained, given)
        tested = trainer.test(trained, given, ckpt_path="best")
        log = (tmp_path / form / "metrics.csv").read_text()
        results.append((module.state_dict(), tested, log, data.calls, trainer.lightning_module))
    (weights, tested, log, calls, federation), (others, *again, own) = results
    assert [tested, log, calls] == again
    assert_same(weights, others, atol=0)
    for client in range(3):
        assert_same(federation.client_model(client).state_dict(), own.client_model(client).state_dict(), atol=0)


def test_resume(tmp_path):
    def fit(rounds: int, **options: Any) -> tuple[Any, Any]:
        module, loop = Net(), FederatedLoop(method=FedPer, cohort=2, **OPTIONS)
        torch.manual_seed(1)
        trainer = saving_trainer(tmp_path / str(rounds), rounds, loop)
        trainer.fit(module, datamodule=Split(), **options)
        return trainer, loop

    whole, loop = fit(4)
    half, _ = fit(2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, after = fit(4, ckpt_path=tmp_path / "half.ckpt")
    assert after.rounds == loop.rounds == 4
    assert_same(loop.federation.server.state_dict(), after.federation.server.state_dict(), atol=0)
    assert float(whole.callback_metrics["val_loss"]) == float(resumed.callback_metrics["val_loss"])


class Looks(L.Callback):
    """Sees what module the hooks get, and logs."""

    def __init__(self) -> None:
        self.seen: set[type] = set()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.seen.add(type(pl_module))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.add(type(pl_module))
        self.log("rounds", float(trainer.current_epoch))


def test_callbacks_before_and_after_it_work_on_the_federation():
    before, after = Looks(), Looks()
    loop = FederatedLoop(method="FedPer", **OPTIONS)
    trainer = quiet_trainer(1, before, loop, after)
    trainer.fit(Net(), Data())
    assert before.seen == after.seen == {type(loop.federation)}
    assert trainer.callback_metrics["rounds"] == 0.0
    assert isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO)


def test_a_second_fit_goes_on_and_another_module_starts_afresh():
    module, data, loop = Net(), Data(), FederatedLoop(method=FedAvg, partition=Toy().partition, seed=SEED)
    trainer = quiet_trainer(1, loop)
    trainer.fit(module, data)
    first = loop.federation
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data)
    assert (loop.federation, loop.rounds, first.round) == (first, 3, 2)
    whole = Net()
    trainer = quiet_trainer(3, loop)
    trainer.fit(whole, Data())
    assert loop.federation is not first
    assert loop.rounds == 3
    assert_same(whole.state_dict(), module.state_dict(), atol=0)


def test_loaders(tmp_path):
    """Loaders of a later test belong to the clients that were trained."""
    samples, results = loaders(), []
    options = {**OPTIONS, "num_clients": 4}
    federation, data = federate(Net(), method=FedPer, **samples, **options)
    trainer = saving_trainer(tmp_path / "call", 2)
    trainer.fit(federation, data)
    results.append(trainer.test(federation, data, ckpt_path="best"))

    module, loop = Net(), FederatedLoop(method=FedPer, **options)
    trainer = saving_trainer(tmp_path / "callback", 2, loop)
    trainer.fit(module, samples["train_dataloaders"], samples["val_dataloaders"])
    fitted = loop.data
    results.append(trainer.test(module, samples["test_dataloaders"], ckpt_path="best"))
    assert results[0] == results[1]
    assert trainer.validate(module, samples["val_dataloaders"])
    assert trainer.datamodule is loop.data is fitted
    trainer.test(dataloaders=samples["test_dataloaders"], ckpt_path="best")  # the module is the Trainer's
    assert loop.federation.test_scores.keys() == set(range(4))


def test_evaluations_need_training_data():
    trainer = quiet_trainer(1, FederatedLoop(method=FedPer, **OPTIONS))
    with pytest.raises(ConfigurationError, match="given only test_dataloaders, but clients are known by their train"):
        trainer.test(Net(), loaders()["test_dataloaders"])


def test_data_of_the_loop_s_own():
    """Silos, which the Trainer could not be given."""
    silos = [TensorDataset(*Toy().tensors(client)) for client in range(3)]
    loop = FederatedLoop(method=FedAvg, datamodule=silos, seed=SEED)
    trainer = quiet_trainer(1, loop)
    trainer.fit(Net(), Data())
    assert [loop.data.num_clients, loop.data.partition.num_clients] == [3, 3]
    assert [len(loop.data.client_data(client).train) for client in range(3)] == [10, 15, 13]


def test_method_by_its_name():
    """As Hydra's instantiate calls it."""

    def weights(method: Any, **options: Any) -> Any:
        module = Net()
        quiet_trainer(1, FederatedLoop(method=method, num_clients=2, seed=SEED, **options)).fit(module, Data())
        return module.state_dict()

    expected = weights(FedProx, mu=0.3, epochs=2)
    path = "pfl_lightning.methods.FedProx"
    assert_same(weights(path, mu=0.3, epochs=2), expected, atol=0)
    assert_same(weights(partial(FedProx, mu=0.3), epochs=2), expected, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": FedPer, "num_client": 3}, "no option 'num_client'; did you mean 'num_clients'"),
        ({"method": FedPer, "qqq": 3}, "no option 'qqq', which has .*num_clients"),
        ({"method": "FedPerr"}, "method 'FedPerr' cannot be found"),
        ({"method": "no.such.Method"}, "cannot be found: .*import path"),
        ({"method": "torch.nn.Linear"}, "method must be a class of pfl_lightning.methods"),
        ({"method": {"class_path": "FedPer"}}, "method must be a class of pfl_lightning.methods"),
        ({"num_clients": 3}, "FederatedLoop got num_clients and no method: add one"),
    ],
)
def test_wrong_options_are_refused_at_once(options, message):
    with pytest.raises(ConfigurationError, match=message):
        FederatedLoop(**options)


def test_wrong_use_is_refused():
    loop = FederatedLoop(method=FedPer, **OPTIONS)
    with pytest.raises(ConfigurationError, match=r"FederatedLoop\(method=FedPer, num_clients=10\) it makes the federa"):
        quiet_trainer(1, FederatedLoop()).fit(Net(), Data())
    federation, data = federate(Net(), Data(), FedPer, num_clients=3)
    with pytest.raises(ConfigurationError, match="not yet a federation, got"):
        quiet_trainer(1, loop).fit(federation, data)
    with pytest.raises(ConfigurationError, match="max_steps"):
        quiet_trainer(1, loop, max_steps=5).fit(Net(), Data())
    quiet_trainer(1, loop).fit(Net(), Data())  # after a refusal it can be used


def test_a_failed_fit_leaves_nothing_behind():
    class Fails(Net):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if Fails.fails:
                raise FloatingPointError("not this time")
            return super().training_step(batch, batch_idx)

    module, data = Fails(), Data()
    loop = FederatedLoop(method=FedPer, engine=TrainerEngine(), **OPTIONS)
    with pytest.raises(Exception, match="not this time"):
        quiet_trainer(1, loop).fit(module, data)
    Fails.fails = False
    quiet_trainer(1, loop).fit(module, data)
    assert loop.rounds == 1


def test_slurm_s_signals_wait_for_the_round(monkeypatch):
    monkeypatch.setattr(Preemption, "is_needed", staticmethod(lambda trainer: True))
    trainer = quiet_trainer(1, FederatedLoop(method=FedPer, **OPTIONS))
    trainer.fit(Net(), Data())
    assert sum(isinstance(callback, Preemption) for callback in trainer.callbacks) == 1


def test_projects_of_the_older_package():
    pl = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning, the older package, is not installed")

    class Old(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            new = Net()
            self.body, self.fc = new.body, new.fc

        forward, training_step, test_step = Net.forward, Net.training_step, Net.test_step

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5, weight_decay=5e-4)

    class OldData(pl.LightningDataModule):
        setup, train_dataloader, test_dataloader = Data.setup, Data.train_dataloader, Data.test_dataloader

        def __init__(self) -> None:
            super().__init__()
            self.toy, self.options = Toy(), {}

    new, old = Net(), Old()
    loops = [FederatedLoop(method=FedPer, **OPTIONS) for _ in range(2)]
    quiet_trainer(2, loops[0]).fit(new, Data())
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=2, callbacks=[loops[1]], num_sanity_val_steps=0, **options)
    trainer.fit(old, OldData())
    assert_same(new.state_dict(), old.state_dict(), atol=0)
    assert isinstance(trainer.lightning_module, Federation)
    assert trainer.test(old, OldData())
    assert trainer.test(old, dataloaders=loaders()["test_dataloaders"])


class Predicts(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.trainer.predicting
        return self(batch[0])


def test_predictions_are_the_global_model_s(tmp_path):
    """Of the module itself, after a fit and from a checkpoint, in this process and in another."""
    samples = loaders()
    inputs = samples["test_dataloaders"].dataset.tensors[0]
    module, loop = Predicts(), FederatedLoop(method=FedAvg, **OPTIONS)
    trainer = saving_trainer(tmp_path / "run", 3, loop)
    trainer.fit(module, samples["train_dataloaders"], samples["val_dataloaders"])
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    last = torch.cat(trainer.predict(module, samples["test_dataloaders"]))
    torch.testing.assert_close(last, loop.federation.global_model()(inputs).detach())
    trainer.predict(dataloaders=samples["test_dataloaders"], ckpt_path=tmp_path / "last.ckpt")
    assert trainer.lightning_module is module

    trainer = quiet_trainer(1, FederatedLoop(method=FedAvg, **OPTIONS))
    fitted = Predicts()
    trainer.fit(fitted, Data())
    trainer.save_checkpoint(tmp_path / "split.ckpt")
    module, loop = Predicts(), FederatedLoop(method=FedAvg, **OPTIONS)
    found = quiet_trainer(1, loop).predict(module, samples["test_dataloaders"])  # not trained
    torch.testing.assert_close(torch.cat(found), Predicts()(inputs).detach())
    trainer = quiet_trainer(1, loop)
    found = trainer.predict(module, samples["test_dataloaders"], ckpt_path=tmp_path / "split.ckpt")
    torch.testing.assert_close(torch.cat(found), fitted(inputs).detach())
