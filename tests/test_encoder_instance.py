"""A module as encoder: every client has a copy that begins with its weights."""

import copy
from functools import partial

import lightning as L
import pytest
import torch
from torch import nn

from pfl_lightning import Federation, SequentialEngine, VectorizedEngine
from pfl_lightning.datamodules import IID, Digits
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import MOON, PFLSSL, Ditto, FedAvg, FedProto, LocalOnly
from pfl_lightning.self_supervised import BYOL


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


class Plain(nn.Module):
    out_features = 16

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({"first": nn.Linear(64, 16)})

    def forward(self, inputs):
        return self.layers["first"](inputs.flatten(1)).relu()


class ByFunction(Plain):
    """Runs its layers by a function made in ``__init__``, which ``copy.deepcopy`` leaves to the original."""

    def __init__(self):
        super().__init__()
        layers = self.layers
        self.function = lambda inputs: layers["first"](inputs.flatten(1)).relu()

    def forward(self, inputs):
        return self.function(inputs)


@pytest.mark.repeated
@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
@pytest.mark.parametrize("method", [LocalOnly, Ditto, FedProto, MOON, partial(PFLSSL, objective=BYOL)])
def test_functions_of_an_encoder_run_the_layers_of_their_own_copy(method, engine):
    found = []
    for encoder in (Plain(), ByFunction()):
        L.seed_everything(0, verbose=False)
        federation, digits = Federation(method, encoder, engine=engine()), data()
        quiet_trainer(accelerator="cpu", enable_model_summary=False).fit(federation, digits)
        models = [federation.client_model(client) for client in range(3)]
        inputs = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        found.append([(model.state_dict(), model.encoder(inputs)) for model in models])
        assert all(
            not torch.equal(model.encoder.layers["first"].weight, Plain().layers["first"].weight) for model in models
        )
    for (plain, expected), (own, got) in zip(*found, strict=True):
        assert torch.equal(expected, got)
        assert plain.keys() == own.keys()
        assert all(torch.equal(plain[name], own[name]) for name in plain)
