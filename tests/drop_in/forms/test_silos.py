"""Clients with their own data modules: each trains as its project would alone."""

from typing import Any

import lightning as L
import pytest
import torch
from _helpers.project import Net
from _helpers.toy import CLASSES, INPUTS, assert_same, quiet_trainer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pfl_lightning import SequentialEngine, TrainerEngine, federate
from pfl_lightning.datamodules import IID, FromSilos
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, FedPer, LocalOnly


def samples(number: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(number, INPUTS, generator=draw), torch.arange(number) % CLASSES)


class Silo(L.LightningDataModule):
    """Loaders without shuffling, and a hook that is the client's own."""

    def __init__(self, number: int, batch_size: int, scale: float) -> None:
        super().__init__()
        self.number, self.batch_size, self.scale = number, batch_size, scale

    def train_dataloader(self) -> Any:
        return DataLoader(samples(self.number, self.number), self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(samples(5, self.number + 1), 2)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * self.scale, batch[1]]


def test_clients_train_as_their_projects_would_alone():
    silos = [Silo(12, 4, 1.0), Silo(20, 3, 0.5), Silo(9, 9, 2.0)]
    federation, data = federate(Net(), silos, LocalOnly, seed=1, epochs=2)
    trainer = quiet_trainer(1)
    trainer.fit(federation, datamodule=data)
    for client, silo in enumerate(silos):
        plain = Net()
        alone = quiet_trainer(2)
        alone.fit(plain, datamodule=Silo(silo.number, silo.batch_size, silo.scale))
        assert_same(dict(federation.client_model(client).state_dict()), dict(plain.state_dict()), atol=0.0)
        expected = float(alone.callback_metrics["val_loss"])
        assert federation.validation_scores[client].logged["val_loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@pytest.mark.parametrize("wrap", [list, tuple])
def test_loaders_and_data_sets_of_different_sizes(engine, wrap):
    own = wrap([DataLoader(samples(12, 1), 4, shuffle=True), samples(30, 2), samples(6, 3)])
    federation, data = federate(Net(), own, FedPer, seed=1, engine=engine(), head="fc")
    trainer = quiet_trainer(2)
    trainer.fit(federation, datamodule=data)
    assert sorted(federation.validation_scores) == [0, 1, 2]
    assert {"val_loss", "train_loss", "val_accuracy/mean"} <= set(trainer.callback_metrics)


class Stream(IterableDataset):
    def __init__(self, own: TensorDataset) -> None:
        self.own = own

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Any:
        return iter(self.own)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
def test_a_stream_trains_as_the_same_items_in_order(engine):
    def weights(first: Any) -> Any:
        own = FromSilos([DataLoader(first, 5), samples(9, 2)], validation_share=0.0)
        federation, data = federate(Net(), own, FedAvg, seed=1, engine=engine())
        quiet_trainer(2).fit(federation, datamodule=data)
        return dict(federation.global_model().state_dict())

    assert_same(weights(Stream(samples(12, 1))), weights(samples(12, 1)), atol=0.0)


@pytest.mark.parametrize("options", [{"num_clients": 2}, {"partition": IID(2)}, {"labels": len}])
def test_they_are_divided_already(options):
    with pytest.raises(
        ConfigurationError, match="is already divided among clients, as is a list with the data of each"
    ):
        federate(Net(), [samples(4, 0), samples(4, 1)], FedAvg, **options)


def test_what_is_no_data_is_refused():
    with pytest.raises(ValueError, match="there are no silos"):
        federate(Net(), [], FedAvg)
