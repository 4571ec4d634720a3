"""A small Lightning project, written as if this package did not exist."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from _helpers.plain import first_net
from _helpers.toy import BATCH, CLASSES, FEATURES, INPUTS, SEED, GivenCohorts, Toy, quiet_trainer
from pfl_lightning import federate


class Net(L.LightningModule):
    """The network of the restatements (``plain.Net``) under other names, with SGD of its own."""

    def __init__(self, lr: float = 0.05, norm: bool = False) -> None:
        super().__init__()
        self.lr = lr
        layers = [nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, FEATURES), nn.Tanh()]
        if norm:
            layers.insert(1, nn.BatchNorm1d(5))
        self.body = nn.Sequential(*layers)
        self.fc = nn.Linear(FEATURES, CLASSES)
        if not norm:
            start = {name.replace("encoder.", "body.").replace("head.", "fc."): p for name, p in state_of_start()}
            self.load_state_dict(start)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.fc(self.body(inputs))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5, weight_decay=5e-4)


def state_of_start() -> Any:
    return first_net(SEED).state_dict().items()


class Data(L.LightningDataModule):
    """The toy data of ``toy.Toy``, in loaders; validation samples are the last of the training set."""

    def __init__(self, toy: Toy | None = None, **options: Any) -> None:
        super().__init__()
        self.toy, self.options = toy or Toy(), options

    def setup(self, stage: str) -> None:
        self.samples = self.toy.load()

    def train_dataloader(self) -> Any:
        train = TensorDataset(self.samples.train_inputs, self.samples.train_targets)
        return DataLoader(train, **{"batch_size": BATCH, "shuffle": True, **self.options})

    def test_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.samples.test_inputs, self.samples.test_targets), batch_size=7)


def run_project(method: Any, rounds: int = 1, *, module: Any = None, data: Any = None, trainer: Any = None, **options):
    """Fit a federation of the project on the toy data's own division."""
    own = Data() if data is None else data
    if "num_clients" not in options:
        options.setdefault("partition", own.toy.partition)
    clients = options.get("num_clients", 5)
    cohorts = options.pop("cohorts", (range(clients),))
    federation, data = federate(Net() if module is None else module, own, method, seed=SEED, **options)
    federation.tests_in_fits = True  # so that both kinds of parts can be looked at after a fit
    trainer = quiet_trainer(rounds, GivenCohorts(*cohorts), **(trainer or {}))
    trainer.fit(federation, datamodule=data)
    return federation, trainer
