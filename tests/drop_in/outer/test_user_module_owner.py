"""Attributes that a module gives itself in hooks that the Trainer calls on it alone are the clients' own, too."""

import copy
import logging
import pickle
import threading
from typing import Any

import pytest
import torch
from _helpers.project import Data, Net
from _helpers.toy import CLASSES, FEATURES, INPUTS, quiet_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import FederatedLoop
from pfl_lightning.drop_in.outer.user_module_owner import UserModuleOwner
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
        self.names.append("b")
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


def test_what_cannot_be_copied_is_named(caplog):
    module = Net()
    other, gained = copy.deepcopy(module), UserModuleOwner(module, copy.deepcopy(module))
    module.lock, module.rate = threading.Lock(), 0.5
    with caplog.at_level(logging.WARNING), gained.handed_to(other):
        other.rate = 0.1  # its own setup
    assert "Net.lock" in caplog.text
    assert other.rate == 0.1
    assert not hasattr(other, "lock")


@pytest.mark.parametrize("again", [copy.deepcopy, lambda gained: pickle.loads(pickle.dumps(gained))])
def test_a_copy_in_another_process_hands_nothing_over(again):
    module = Net()
    gained, other = again(UserModuleOwner(module, module)), copy.deepcopy(module)
    module.rate = 0.5
    with gained.handed_to(other):
        pass
    assert not hasattr(other, "rate")
