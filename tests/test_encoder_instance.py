"""A module as encoder: every client has a copy that begins with its weights."""

import copy

import lightning as L
import pytest
import torch
from torch import nn

from pfl_lightning import Federation
from pfl_lightning.datamodules import IID, Digits
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, LocalOnly


def data():
    return Digits(IID(num_clients=3, samples_per_client=30), batch_size=10)


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())


def quiet_trainer(**options):
    return L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, **options)


@pytest.mark.parametrize("method", [FedAvg, LocalOnly])
def test_it_begins_with_the_modules_weights_and_leaves_them(method):
    encoder = network()
    before = copy.deepcopy(encoder.state_dict())
    federation, digits = Federation(method, encoder), data()
    digits.setup("fit")
    [client] = federation.build_models(digits)
    assert client.encoder.out_features == 16
    assert torch.equal(client.encoder[1].weight, before["1.weight"])
    quiet_trainer(accelerator="cpu").fit(federation, digits)
    assert all(torch.equal(before[name], value) for name, value in encoder.state_dict().items())
    assert not torch.equal(federation.client_model(0).encoder[1].weight, before["1.weight"])


def test_modules_and_names_in_turn():
    digits = data()
    digits.setup("fit")
    clients = Federation(LocalOnly, [network(), "mlp"]).build_models(digits)
    assert [client.encoder.out_features for client in clients] == [16, 64]
    assert [row.encoder for row in Federation(LocalOnly, [network(), "mlp"]).describe(digits)] == ["Sequential", "mlp"]


def test_features_must_be_vectors():
    digits = data()
    digits.setup("fit")
    with pytest.raises(ConfigurationError, match="has no integer attribute out_features"):
        Federation(FedAvg, nn.Sequential(nn.Conv2d(1, 4, 3))).build_models(digits)
    with pytest.raises(ConfigurationError, match="could not be made for inputs of shape"):
        Federation(FedAvg, nn.Sequential(nn.Flatten(), nn.Linear(5, 4))).build_models(digits)
