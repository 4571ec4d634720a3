"""What a Federation is made of, and what is said where it is something else."""

import copy
import pickle
from functools import partial

import pytest
import torch
from _helpers.toy import Toy, quiet_trainer, run, tiny_encoder
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn

from pfl_lightning import Federation, federate
from pfl_lightning.datamodules import IID, FromDatasets
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import Ditto, FedAvg, FedPAC, FedProx, FedRep


class _Alone(FedAvg):
    """A client that brings its own encoder."""

    def __init__(self, width=4, **options):
        super().__init__(nn.Linear(6, width), 3, **options)


def test_a_client_that_needs_no_encoder_is_made_and_copied():
    made = _Alone(width=5, lr=0.2)
    assert (made.head.in_features if hasattr(made.head, "in_features") else 5, made.lr) == (5, 0.2)
    plain = FedAvg(encoder=tiny_encoder((6,)), num_classes=3)
    for other in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), plain.parameters(), strict=True))
    with pytest.raises(AttributeError):
        plain.__wrapped__  # noqa: B018


@pytest.mark.parametrize("method", [FedRep, Ditto])
def test_a_name_is_the_class(method):
    by_name = run(method.__name__, 1)
    assert type(by_name.models[0]) is method
    by_path = run(f"{method.__module__}.{method.__name__}", 1)
    for one, another in zip(by_name.models[0].parameters(), by_path.models[0].parameters(), strict=True):
        assert torch.equal(one, another)


def test_federate_takes_a_name():
    loader = torch.utils.data.DataLoader(RandomDataset(32, 20))
    federation, data = federate(BoringModel(), loader, "FedProx", num_clients=2, mu=0.25)
    quiet_trainer(1).fit(federation, datamodule=data)
    assert isinstance(federation.models[0], FedProx)
    assert federation.models[0].mu == 0.25
    with pytest.raises(ConfigurationError, match=r"'FedProxx' cannot be found: .* did you mean 'FedProx'\?"):
        federate(BoringModel(), loader, "FedProxx", num_clients=2)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("FedPacc", r"method 'FedPacc' cannot be found: give a name .*; did you mean 'FedPAC'\?"),
        ("no.such.Method", "cannot be found: .*No module named 'no'"),
        (".", "cannot be found"),
        ("torch.nn.Linear", r"a class of pfl_lightning\.methods, .*, or its name; got str"),
        (nn.Linear, "a class of .*; got .*Linear"),
        (partial(nn.Linear, 3), "a class of .*; got partial"),
        (None, "a class of .*; got NoneType"),
        ({"class_path": "FedAvg"}, "a class of .*; got dict"),
    ],
)
def test_what_is_no_method(method, message):
    with pytest.raises(ConfigurationError, match=message):
        Federation(method, "mlp")


def test_a_client_in_place_of_its_class():
    made = FedPAC(tiny_encoder((6,)), 4)
    with pytest.raises(ConfigurationError, match=r"a partial of one .*; got FedPAC"):
        Federation(made, tiny_encoder)


@pytest.mark.parametrize("encoder", [None, 64, 0.5, object(), {"mlp": 1}])
def test_what_is_no_encoder(encoder):
    with pytest.raises(ConfigurationError, match=r"encoder must be a name, such as 'mlp', a module, .* got "):
        Federation(FedAvg, encoder)


class _Whole(torch.utils.data.Dataset):
    def __init__(self, dtype):
        self.inputs = torch.arange(60 * 6).reshape(60, 6).remainder(7).to(dtype)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], index % 3


class _Indices(nn.Module):
    def __init__(self, input_shape):
        super().__init__()
        self.table, self.out_features = nn.Embedding(7, 5), 5

    def forward(self, inputs):
        return self.table(inputs).mean(1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.bool])
def test_inputs_that_are_no_floats(dtype):
    data = FromDatasets(IID(3), train=_Whole(dtype))
    message = rf"the encoder \w+ fails on inputs of shape .* and type {dtype}: .*float32.*nn\.Embedding"
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer(1).fit(Federation(FedAvg, tiny_encoder, seed=1), datamodule=data)


def test_indices_for_an_embedding_run():
    data = FromDatasets(IID(3), train=_Whole(torch.int64))
    federation = Federation(partial(FedAvg, epochs=1), _Indices, seed=1)
    quiet_trainer(1).fit(federation, datamodule=data)
    assert federation.has_trained


def _huge(input_shape):
    return nn.Linear(input_shape[0], 10**13)


def _no_memory(input_shape):
    raise MemoryError


@pytest.mark.parametrize("encoder", [_huge, _no_memory])
def test_an_encoder_that_does_not_fit_into_memory(encoder):
    with pytest.raises(ConfigurationError, match=rf"the encoder {encoder.__name__} .* does not fit into memory: make"):
        quiet_trainer(1).fit(Federation(FedAvg, encoder, seed=1), datamodule=Toy())
