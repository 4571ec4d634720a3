"""What callbacks of a project ask the federation for: layers, methods, forward and hyper-parameters of the module."""

import copy
from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import Data, Net, run_project
from _helpers.toy import WEIGHTS_ONLY, assert_same, quiet_trainer
from torch import nn

from pfl_lightning import federate
from pfl_lightning.methods import FedAvg, FedPer


class Own(Net):
    """Hyper-parameters, a method, an attribute and a loader of its own."""

    def __init__(self, width: int = 3, layer: Any = None) -> None:
        super().__init__(norm=True)
        self.save_hyperparameters()
        self.names = ["a", "b"]

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs)

    def shout(self, value: float) -> None:
        self.log("shouted", value)

    def train_dataloader(self) -> Any:
        raise AssertionError("the federation has data of its own")


INPUTS = torch.ones(3, 6)


class Asking(L.Callback):
    """Asks at the hooks of a round."""

    def __init__(self) -> None:
        self.first: Any = None
        self.weights: dict[str, list[torch.Tensor]] = {}
        self.layers: set[int] = set()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.first = pl_module.fc.weight.detach().clone()
        assert pl_module.hparams.width == 5

    def ask(self, hook: str, module: Any) -> None:
        assert isinstance(module.fc, nn.Linear)
        self.layers.add(id(module.fc))
        self.weights.setdefault(hook, []).append(module.fc.weight.detach().clone())
        assert module.names == ["a", "b"]
        assert module(INPUTS).shape == (3, 5)
        torch.testing.assert_close(module(INPUTS)[:1], module(INPUTS[:1]))  # no batch statistics
        assert module.embed(INPUTS).shape == (3, 4)
        assert dict(module.hparams) == {"method": "FedPer", "width": 5, "layer": module.hparams.layer}
        assert hasattr(module, "names")
        assert not hasattr(module, "nothing")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.ask("start", pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.ask("batch", pl_module)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.ask("validation", pl_module)
        pl_module.shout(7.0)
        with torch.no_grad():
            pl_module.fc.bias.fill_(99.0)  # reaches nobody

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.ask("end", pl_module)
        pl_module(INPUTS.clone().requires_grad_()).sum().backward()  # as for a map of saliency


def test_callbacks_see_the_current_global_model():
    asking, module = Asking(), Own(5, layer=nn.Linear(2, 2))
    federation, data = federate(module, Data(drop_last=True), FedAvg, num_clients=3, seed=1, cohort=2, epochs=2)
    asking.ask = lambda hook, own: asking.weights.setdefault(hook, []).append(own.fc.weight.detach().clone())
    trainer = quiet_trainer(2, asking)
    trainer.fit(federation, datamodule=data)
    start, validation, batch, end = (asking.weights[name] for name in ("start", "validation", "batch", "end"))
    assert torch.equal(start[0], asking.first)
    assert torch.equal(batch[0], start[0])  # before the server has aggregated
    assert not torch.equal(end[0], start[0])
    assert torch.equal(validation[0], end[0])
    assert torch.equal(start[1], end[0])
    assert torch.equal(end[1], module.fc.weight)
    assert torch.equal(end[1], federation.global_model().fc.weight)


def test_callbacks_reach_layers_methods_and_hyperparameters_and_change_nothing():
    def fitted(*callbacks: Any) -> Any:
        torch.manual_seed(0)
        module = Own(5, layer=nn.Linear(2, 2))
        federation, data = federate(module, Data(drop_last=True), FedPer, num_clients=2, seed=1, head="fc")
        trainer = quiet_trainer(2, *callbacks)
        trainer.fit(federation, datamodule=data)
        return federation, trainer

    asking = Asking()
    federation, trainer = fitted(asking)
    other, _ = fitted()
    assert len(asking.layers) == 1  # of one copy for all rounds
    assert float(trainer.callback_metrics["shouted"]) == 7.0
    assert_same(dict(federation.global_model().state_dict()), dict(other.global_model().state_dict()))
    assert_same(dict(federation.client_model(1).state_dict()), dict(other.client_model(1).state_dict()))


def test_lightning_finds_nothing_of_the_module_where_it_asks_for_hooks():
    module = Own(5)
    federation, _ = federate(module, Data(drop_last=True), FedAvg, num_clients=2)
    assert type(federation).train_dataloader is L.LightningModule.train_dataloader
    for name in ("training_epoch_end", "_orig_mod", "__deepcopy__", "clients", "nothing"):
        with pytest.raises(AttributeError, match=name):
            getattr(federation, name)
    assert federation.shown is module  # nothing is copied before there is anything to show
    assert federation.embed(INPUTS).shape == (3, 4)


def test_a_federation_that_was_asked_is_copied():
    federation, _ = run_project(FedAvg, module=Own(5), data=Data(drop_last=True))
    wanted = federation(INPUTS)
    federation._trainer = None
    other = copy.deepcopy(federation)
    assert other._shown is None
    assert torch.equal(other(INPUTS), wanted)
    assert other.hparams.width == 5


def test_hyperparameters_of_checkpoints_are_plain(tmp_path):
    federation, data = federate(Own(5, layer=nn.Linear(2, 2)), Data(drop_last=True), FedAvg, num_clients=2, seed=1)
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    found = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert found["hyper_parameters"] == {"width": 5}  # the method is no argument of the module


def test_an_attribute_of_a_model_that_a_checkpoint_brings(tmp_path):
    federation, data = federate(Net(), Data(), FedAvg, num_clients=2, seed=1)
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    wanted = federation.fc.weight.detach().clone()
    quiet_trainer(2).fit(federation, datamodule=data, ckpt_path=tmp_path / "one.ckpt")
    assert not torch.equal(federation.fc.weight, wanted)
    quiet_trainer(2).test(federation, datamodule=data, ckpt_path=tmp_path / "one.ckpt", **WEIGHTS_ONLY)
    assert torch.equal(federation.fc.weight, wanted)
