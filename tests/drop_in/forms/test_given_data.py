"""Loaders that are given as to a Trainer, without a data module."""

from typing import Any

import pytest
import torch
from _helpers.project import Data, Net
from _helpers.toy import CLASSES, INPUTS, assert_same, quiet_trainer
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import federate
from pfl_lightning.datamodules import FromLoaders, FromSilos
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg


def loader(number: int) -> Any:
    draw = torch.Generator().manual_seed(number)
    samples = TensorDataset(torch.randn(number, INPUTS, generator=draw), torch.arange(number) % CLASSES)
    return DataLoader(samples, batch_size=4, shuffle=True)


def fitted(*given: Any, **options: Any) -> Any:
    federation, data = federate(Net(), *given, method=FedAvg, seed=1, **options)
    quiet_trainer(1).fit(federation, datamodule=data)
    return dict(federation.global_model().state_dict())


def test_loaders_are_as_good_as_their_data_module():
    own = Data()
    own.setup("fit")
    train, test = own.train_dataloader(), own.test_dataloader()
    expected = fitted(own, num_clients=3)
    assert_same(fitted(train_dataloaders=train, test_dataloaders=test, num_clients=3), expected, atol=0.0)
    assert_same(fitted(train, test_dataloaders=test, num_clients=3), expected, atol=0.0)


def test_a_list_of_loaders_is_one_a_client():
    own = {"train_dataloaders": [loader(20), loader(30)], "val_dataloaders": [loader(5), loader(6)]}
    _, data = federate(Net(), method=FedAvg, **own)
    data.setup("fit")
    assert isinstance(data, FromSilos)
    assert [len(data.client_data(client).validation) for client in range(2)] == [5, 6]
    _, data = federate(Net(), own["train_dataloaders"], FedAvg, test_dataloaders=[loader(5), None])
    data.setup("fit")
    assert [len(data.client_data(client).test) for client in range(2)] == [5, 0]


def test_one_loader_is_divided():
    _, data = federate(Net(), loader(20), FedAvg, num_clients=2)
    assert isinstance(data, FromLoaders)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([Data()], {"val_dataloaders": loader(4)}, "got val_dataloaders and a Data: give either a LightningDataModule"),
        ([], {"val_dataloaders": loader(4)}, "got val_dataloaders and no loader for training"),
        ([loader(4)], {"train_dataloaders": loader(4)}, "got train_dataloaders and a DataLoader"),
        ([], {"train_dataloaders": loader(4)}, "give either partition"),
        (
            [],
            {"train_dataloaders": [loader(4), loader(4)], "val_dataloaders": loader(4)},
            "there are 2 training loaders, one for each client, and other loaders are not 2: pass",
        ),
        (
            [[loader(4), loader(4)]],
            {"val_dataloaders": [loader(4)]},
            "there are 2 training loaders, one for each client, and other loaders are not 2: pass",
        ),
    ],
)
def test_what_contradicts_itself(given, options, message):
    with pytest.raises(ConfigurationError, match=message):
        federate(Net(), *given, method=FedAvg, **options)
