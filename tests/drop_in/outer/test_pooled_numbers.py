"""Numbers that a module has of the data of all clients, before there are clients."""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import Net
from _helpers.toy import CLASSES, INPUTS, quiet_trainer
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import FederatedLoop
from pfl_lightning.methods import FedAvg

ITEMS, BATCH_SIZE, EPOCHS = 66, 6, 3


def loader() -> Any:
    samples = TensorDataset(torch.randn(ITEMS, INPUTS), torch.arange(ITEMS) % CLASSES)
    return DataLoader(samples, BATCH_SIZE)


class OfLoader(Net):
    def train_dataloader(self) -> Any:
        own = loader()
        self.steps = len(own)
        return own


class OfLoaderInAll(Net):
    def train_dataloader(self) -> Any:
        own = loader()
        self.plan = {"total": len(own) * self.trainer.max_epochs}
        return own


class Prepared(Net):
    def prepare_data(self) -> None:
        self.share = 1 / ITEMS

    def train_dataloader(self) -> Any:
        return loader()


class SetUp(Net):
    def setup(self, stage: str) -> None:
        self.total = EPOCHS * len(loader())

    def train_dataloader(self) -> Any:
        return loader()


class Configured(Net):
    def configure_model(self) -> None:
        self.seen_items = float(ITEMS)

    def train_dataloader(self) -> Any:
        return loader()


class Counts(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.samples = loader().dataset
        self.num_samples, self.num_classes = len(self.samples), CLASSES

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, BATCH_SIZE)


class OfDataModule(Net):
    def configure_optimizers(self) -> Any:
        self.total = self.trainer.datamodule.num_samples * self.trainer.datamodule.num_classes
        return super().configure_optimizers()


def warned(module: Any, clients: int, *data: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(EPOCHS, FederatedLoop(method=FedAvg, num_clients=clients, seed=1)).fit(module, *data)
    return [str(each.message) for each in caught if "computed from the data of all clients" in str(each.message)]


@pytest.mark.parametrize(
    ("module", "data", "found"),
    [
        (
            OfLoader,
            [],
            "OfLoader.steps = 11:",
        ),
        (OfLoaderInAll, [], "OfLoaderInAll.plan = 33:"),
        (
            Prepared,
            [],
            "Prepared.share = 0.0151515:",
        ),
        (
            SetUp,
            [],
            "SetUp.total = 33:",
        ),
        (
            Configured,
            [],
            "Configured.seen_items = 66:",
        ),
        (OfDataModule, [Counts], "Counts.num_samples = 66:"),
    ],
)
def test_such_a_number_is_named_once(module, data, found):
    (message,) = warned(module(), 2, *[kind() for kind in data])
    assert found in message
    assert "(66 training items; 11 training batches), but client 0 has only" in message
    assert not any(name in message for name in ("num_classes", "lr ="))
    assert warned(module(), 1, *[kind() for kind in data]) == []  # one client has all of them
