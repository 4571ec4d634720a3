"""``setup``, ``teardown``, ``prepare_data``, checkpoint hooks and ``predict`` of a project, as Lightning calls them."""

from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import WEIGHTS_ONLY, quiet_trainer
from torch.utils.data import DataLoader

from pfl_lightning import federate
from pfl_lightning.methods import Ditto, FedAvg

INPUTS = torch.linspace(-1, 1, 24).reshape(4, 6)


class Staged(Net):
    """Notes the hooks around its runs."""

    calls: list[str]
    ready = False

    def prepare_data(self) -> None:
        assert self.trainer is not None
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        assert self.trainer.datamodule.toy is not None
        self.calls.append("setup " + stage)
        setattr(self, "for_" + stage, 1)

    def teardown(self, stage: str) -> None:
        self.calls.append("teardown " + stage)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        type(self).ready = hasattr(self, "for_test")
        super().test_step(batch, batch_idx)


def project(module: Any, method: Any = FedAvg, **options: Any) -> Any:
    return federate(module, Data(), method, num_clients=2, seed=1, head="fc", **options)


def test_stages_are_called_as_lightning_calls_them():
    Staged.calls = []
    federation, data = project(Staged())
    trainer = quiet_trainer(1)
    trainer.validate(federation, datamodule=data, verbose=False)
    assert Staged.calls == ["prepare_data", "setup validate", "teardown validate"]
    Staged.calls.clear()
    trainer.fit(federation, datamodule=data)
    trainer.test(federation, datamodule=data, verbose=False)
    assert Staged.calls == ["prepare_data", "setup fit", "teardown fit", "prepare_data", "setup test", "teardown test"]
    assert Staged.ready
    Staged.calls.clear()
    trainer.fit(federation, datamodule=data)
    assert Staged.calls == ["prepare_data", "teardown fit"]  # it has seen that stage
    assert federation.given_module._trainer is None


def test_clients_that_adapt_before_a_test_are_set_up_for_training():
    Staged.calls = []
    federation, data = project(Staged(), fine_tune="head")
    quiet_trainer(1).test(federation, datamodule=data, verbose=False)
    assert Staged.calls == ["prepare_data", "setup test", "setup fit", "teardown test"]


def test_a_fit_after_a_validation_is_the_same_fit():
    def fitted(first: bool) -> Any:
        Staged.calls = []
        federation, data = project(Staged(), Ditto)
        if first:
            quiet_trainer(1).validate(federation, datamodule=data, verbose=False)
        quiet_trainer(1).fit(federation, datamodule=data)
        return federation.client_model(0).fc.weight

    assert torch.equal(fitted(True), fitted(False))


class Late(L.LightningModule):
    """Makes its layers in setup, whenever it is called."""

    def setup(self, stage: str) -> None:
        self.net = torch.nn.Linear(6, 5)
        self.frozen = torch.nn.Linear(6, 5).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs) + self.frozen(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def test_layers_that_are_made_again_hold_what_was_trained():
    federation, data = federate(Late(), Data(), FedAvg, num_clients=2, seed=1, head=())
    trainer = quiet_trainer(2)
    trainer.fit(federation, datamodule=data)
    before = {name: value.clone() for name, value in federation.global_model().state_dict().items()}
    trainer.test(federation, datamodule=data, verbose=False)
    for name, value in federation.client_model(0).state_dict().items():
        assert torch.equal(value, before[name]), name
    assert {name for name, p in federation.global_model().named_parameters() if not p.requires_grad} == {
        "frozen.weight",
        "frozen.bias",
    }


class Remembering(Net):
    """Has something beside its weights in its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def setup(self, stage: str) -> None:
        if not self.words:
            self.words = ["a", "b"]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert set(checkpoint["state_dict"]) == set(self.state_dict())
        checkpoint["words"] = [*self.words, str(checkpoint["epoch"])]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert "fc.weight" in checkpoint["state_dict"]
        self.words = checkpoint["words"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.datamodule.heard.add(tuple(self.words))
        return super().training_step(batch, batch_idx)


def test_what_the_module_saves_comes_back(tmp_path):
    federation, data = project(Remembering())
    data.datamodule.heard = set()
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert data.datamodule.heard == {("a", "b")}
    module = Remembering()
    again, data = project(module)
    data.datamodule.heard = set()
    quiet_trainer(2).fit(again, datamodule=data, ckpt_path=tmp_path / "one.ckpt")
    assert data.datamodule.heard == {("a", "b", "1")}
    assert again.global_model().words == module.words == again.words == ["a", "b", "1"]


def test_a_checkpoint_without_what_the_module_saves(tmp_path):
    federation, data = project(Net())
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again, data = project(Remembering())
    with pytest.raises(KeyError, match="words"):  # as in a plain run
        quiet_trainer(1).test(again, datamodule=data, ckpt_path=tmp_path / "one.ckpt", **WEIGHTS_ONLY, verbose=False)


class Predicting(Net):
    """Predicts classes, of inputs that a hook changes."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch * 2 if isinstance(batch, torch.Tensor) else batch

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        assert isinstance(self, Predicting)
        assert not self.training
        return self(batch).argmax(1), batch_idx


class Batches(L.Callback):
    """Sees what is predicted."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        self.seen.append((len(outputs[0]), len(batch)))


def wanted(federation: Any) -> list[int]:
    return federation.global_model().eval()(INPUTS * 2).argmax(1).tolist()


def test_the_global_model_predicts(tmp_path):
    federation, data = project(Predicting())
    loader, callback = DataLoader(INPUTS, batch_size=3), Batches()
    trainer = quiet_trainer(1, callback)
    trainer.fit(federation, datamodule=data)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    found = trainer.predict(federation, dataloaders=loader)
    assert torch.cat([classes for classes, _ in found]).tolist() == wanted(federation)
    assert [index for _, index in found] == [0, 1]
    assert callback.seen == [(3, 3), (1, 1)]
    other = quiet_trainer(1).predict(federation, dataloaders=loader)  # without the data
    assert torch.equal(other[0][0], found[0][0])
    own = quiet_trainer(1).predict(federation.client_model(1), dataloaders=loader)
    assert len(own) == 2
    trainer.fit(federation, datamodule=data)  # its hooks are its own again


class DataToPredict(Data):
    """Has something to predict, and a hook of its own."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "predict":
            self.to_predict = DataLoader(INPUTS, batch_size=2)

    def predict_dataloader(self) -> Any:
        return self.to_predict

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + 1 if isinstance(batch, torch.Tensor) else batch


def test_predictions_of_a_checkpoint_on_the_project_s_own_data(tmp_path):
    federation, data = federate(Predicting(), DataToPredict(), FedAvg, num_clients=2, seed=1, head="fc")
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    expected = federation.global_model().eval()((INPUTS + 1) * 2).argmax(1).tolist()
    again, data = federate(Predicting(), DataToPredict(), FedAvg, num_clients=2, seed=1, head="fc")
    path = tmp_path / "one.ckpt"
    found = quiet_trainer(1).predict(again, datamodule=data, ckpt_path=path, **WEIGHTS_ONLY)
    assert torch.cat([classes for classes, _ in found]).tolist() == expected
    assert "predict_dataloader" not in vars(data)


class Counted(Data):
    """Keeps a count in checkpoints."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["count"]


@pytest.mark.parametrize("silos", [False, True])
def test_the_state_of_data_modules_is_in_checkpoints(silos, tmp_path):
    def given(first: int, second: int) -> Any:
        own = [Counted(first), Counted(second)]
        federation, data = federate(Net(), own if silos else own[0], FedAvg, seed=1, num_clients=None if silos else 2)
        return own, federation, data

    _, federation, data = given(3, 5)
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    own, federation, data = given(0, 0)
    quiet_trainer(2).fit(federation, datamodule=data, ckpt_path=tmp_path / "first.ckpt")
    assert [each.count for each in own] == ([3, 5] if silos else [3, 0])


class Plans(Net):
    """Lays out its schedule in setup."""

    def setup(self, stage: str) -> None:
        self.planned = self.trainer.estimated_stepping_batches


def test_a_setup_that_counts_batches_is_told_that_they_are_clients():
    with pytest.warns(UserWarning, match="configure_model of Plans asks its Trainer for training batches.*clients"):
        run_project(FedAvg, 1, module=Plans(), head="fc")
