"""Layers that a module makes in ``setup`` or ``configure_model`` are there after a fit, as in a plain run."""

from typing import Any

import pytest
import torch
from _helpers.project import Data, Net
from _helpers.toy import CLASSES, FEATURES, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pfl_lightning import FederatedLoop
from pfl_lightning.methods import FedAvg


class Late(Net):
    """Has a head whose size the data module knows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = None  # type: ignore[assignment]

    def setup(self, stage: str) -> None:
        if self.fc is None:
            self.fc = nn.Linear(FEATURES, len(self.trainer.datamodule.toy.load().class_names))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Configured(Net):
    """Makes its head in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.fc is None:
            self.fc = nn.Linear(FEATURES, CLASSES)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


@pytest.mark.parametrize("kind", [Late, Configured])
@pytest.mark.filterwarnings("error:.*changes made")
def test_predictions_are_those_of_the_global_model(kind):
    module, loop, data = kind(), FederatedLoop(method=FedAvg, num_clients=2, seed=0), Data()
    trainer = quiet_trainer(1, loop)
    trainer.fit(module, data)
    assert isinstance(module.fc, nn.Linear)
    loader = data.test_dataloader()
    model = loop.federation.global_model().eval()
    found = trainer.predict(module, loader)
    assert torch.allclose(torch.cat(found), model(loader.dataset.tensors[0]))
    head = module.fc
    quiet_trainer(1, loop).fit(module, data)
    assert module.fc is head
    assert torch.equal(head.weight, loop.federation.global_model().fc.weight)


class SetUp(Net):
    """Sets in ``setup`` what ``configure_model`` and ``forward`` need: attributes, data and layers without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = self.num_classes = None  # type: ignore[assignment]
        self.scale = torch.ones(())
        self.out: Any = nn.Identity()

    def setup(self, stage: str) -> None:
        self.num_classes, self.scale, self.out = CLASSES, torch.full((), 5.0), nn.Tanh()
        self.heads = {"body": self.body}
        self.seen = TensorDataset(torch.zeros(3))

    def configure_model(self) -> None:
        if self.fc is None:
            self.fc = nn.Linear(FEATURES, self.num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(super().forward(inputs) * self.scale)


@pytest.mark.filterwarnings("error:.*changes made")
def test_what_setup_sets_is_there():
    module, loop, data = SetUp(), FederatedLoop(method=FedAvg, num_clients=2, seed=0), Data()
    for _ in range(2):
        quiet_trainer(1, loop).fit(module, data)
        inputs = data.test_dataloader().dataset.tensors[0]
        assert torch.equal(module(inputs), loop.federation.global_model()(inputs))
    assert isinstance(module.out, nn.Tanh)
    assert module.heads["body"] is module.body
    assert len(module.seen) == 3
