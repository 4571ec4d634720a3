"""Attributes that a module gives itself in hooks that the Trainer calls on it alone are the clients' own, too."""

from typing import Any

import pytest
import torch
from _helpers.project import Data, Net
from _helpers.toy import CLASSES, FEATURES, INPUTS, quiet_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import FederatedLoop, federate
from pfl_lightning.methods import FedAvg


def items() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(40, INPUTS, generator=draw), torch.arange(40) % CLASSES)


class Weighing(Net):
    """Brings its loaders, and learns of its classes where it makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.source, self.fc = None, None, None  # type: ignore[assignment]
        self.made = False
        self.register_buffer("scale", torch.zeros(1))

    def prepare_data(self) -> None:
        self.source, self.names = items(), ["a"]

    def setup(self, stage: str) -> None:
        assert self.source is not None
        self.names = [*self.names[:1], "b"]
        if not self.made:  # must not be true of a copy that has not made its layers
            self.fc, self.made = nn.Linear(FEATURES, len(self.source.tensors[1].unique())), True

    def train_dataloader(self) -> Any:
        self.weights, self.layers, self.scale = torch.ones(CLASSES), [self.fc, self.body], torch.ones(1)
        return DataLoader(self.source, 8)

    def val_dataloader(self) -> Any:
        return DataLoader(self.source, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.names == ["a", "b"]
        assert self.layers[1] is self.body
        return F.cross_entropy(self(batch[0]), batch[1], weight=self.weights * self.scale)


def test_clients_have_what_the_module_made_with_its_loaders():
    module, loop = Weighing(), FederatedLoop(method=FedAvg, num_clients=2, seed=0)
    quiet_trainer(1, loop).fit(module)
    own = loop.federation.client_model(0)
    assert own.weights is not module.weights
    assert own.source is module.source
    assert float(own.scale) == 1.0


class Preparing(Net):
    def prepare_data(self) -> None:
        self.weights = torch.ones(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1], weight=self.weights)


def test_what_is_prepared_beside_a_data_module_reaches_clients():
    loop = FederatedLoop(method=FedAvg, num_clients=2, seed=0)
    quiet_trainer(1, loop).fit(Preparing(), Data())
    assert torch.equal(loop.federation.client_model(1).weights, torch.ones(CLASSES))


def test_values_that_change_after_the_federation_was_made_count_and_are_named():
    module = Net()
    federation, data = federate(module, Data(), FedAvg, num_clients=2, seed=0)
    module.fc.weight.data.fill_(0.5)
    with pytest.warns(UserWarning, match="values of Net have changed since the federation was made of it"):
        quiet_trainer(0).validate(federation, datamodule=data, verbose=False)
    assert torch.equal(federation.client_model(0).fc.weight, torch.full_like(module.fc.weight, 0.5))


class Inner(nn.Module):
    pass


class Staged(Net):
    """Sets attributes in each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def setup(self, stage: str) -> None:
        self.stage = self.inner.stage = stage
        self.parts = [self.body, self.fc]

    def test_step(self, batch: Any, batch_idx: int) -> None:
        assert (self.stage, self.inner.stage) == ("test", "test")
        assert self.parts[1] is self.fc
        super().test_step(batch, batch_idx)


def test_what_a_later_setup_sets_reaches_the_clients():
    module, loop = Staged(), FederatedLoop(method=FedAvg, num_clients=2, seed=0)
    trainer = quiet_trainer(1, loop)
    trainer.fit(module, Data())
    trainer.test(module, Data(), verbose=False)
    assert loop.federation.client_model(0).stage == module.stage == "test"
