"""An encoder that its author has frozen stays as it is, and neither travels nor is stored."""

from functools import partial

import pytest
import torch
from _helpers.toy import CLIENTS, Toy, assert_same, normed_encoder, run, tiny_encoder, whole_state
from torch import nn

from pfl_lightning import SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import (
    APFL,
    FML,
    GPFL,
    MOON,
    SCAFFOLD,
    Ditto,
    FedALA,
    FedAS,
    FedAvg,
    FedBABU,
    FedDBE,
    FedEM,
    FedEMA,
    FedFomo,
    FedKD,
    FedMD,
    FedPAC,
    FedPer,
    FedRep,
    HypCluster,
    KNNPer,
    KTpFL,
    LGFedAvg,
    PerFedAvg,
    PFedMe,
)

ENGINES = (SequentialEngine, TrainerEngine, VectorizedEngine)


def half_frozen(input_shape):
    """Its first layer is frozen."""
    encoder = tiny_encoder(input_shape)
    encoder[0].requires_grad_(False)
    return encoder


def wholly_frozen(input_shape):
    """With batch normalization, in training mode."""
    return normed_encoder(input_shape).requires_grad_(False)


def first_values(federation):
    """The frozen layer as it was, of the same seed."""
    return run(FedAvg, 0, encoder=half_frozen).models[0].encoder[0].weight


PAIRS = [
    *((method, engine) for method in (FedAvg, FedBABU, Ditto) for engine in ENGINES),
    *((method, SequentialEngine) for method in (FedPer, LGFedAvg, FedRep, SCAFFOLD, MOON, APFL, PFedMe, PerFedAvg)),
    *((method, SequentialEngine) for method in (FedDBE, FedALA, FedAS, GPFL)),
]


@pytest.mark.repeated
@pytest.mark.parametrize(("method", "engine"), PAIRS)
def test_a_frozen_layer_stays(method, engine):
    federation = run(method, 2, encoder=half_frozen, engine=engine())
    frozen = {"encoder.0.weight", "encoder.0.bias"}
    if method in (Ditto, APFL):
        frozen |= {f"global_model.{name}" for name in frozen}
    if method is MOON:
        frozen |= {"previous.networks.0.0.weight", "previous.networks.0.0.bias"}
    model = federation.models[0]
    assert model.frozen == frozen
    assert frozen.isdisjoint((*model.shared_names(), *model.kept_names(), *model.fixed_names()))
    for store in federation.personal.stores:
        assert frozen.isdisjoint(store.initial)
    start = first_values(federation)
    for client in range(CLIENTS):
        own = federation.client_model(client)
        assert torch.equal(own.encoder[0].weight, start)
        assert not own.encoder[0].weight.requires_grad
        assert own.encoder[2].weight.requires_grad
    if engine is TrainerEngine:
        assert_same(whole_state(federation), whole_state(run(method, 2, encoder=half_frozen)))


@pytest.mark.parametrize("method", [HypCluster, FedEM, FedFomo, KNNPer, FedMD, KTpFL])
def test_a_frozen_layer_stays_where_models_or_scores_are_compared(method):
    options = {"public_samples": 8} if method in (FedMD, KTpFL) else {}
    federation = run(partial(method, **options), 2, encoder=half_frozen)
    model, start = federation.models[0], run(FedAvg, 0, encoder=half_frozen).models[0].encoder[0].state_dict()
    assert {"encoder.0.weight", "encoder.0.bias"} <= model.frozen
    assert model.frozen.isdisjoint((*model.shared_names(), *model.kept_names()))
    for client in range(CLIENTS):
        own = federation.client_model(client)
        for name in model.frozen:
            assert torch.equal(own.get_parameter(name), start[name.rpartition(".")[2]])
        assert own.encoder[2].weight.requires_grad


def test_a_wholly_frozen_encoder_sends_the_head_alone():
    federation = run(FedAvg, 2, encoder=wholly_frozen)
    assert federation.models[0].shared_names() == ["head.weight", "head.bias"]
    assert not federation.models[0].encoder[1].running_mean.any()
    with pytest.raises(ConfigurationError, match="phase 'encoder' of FedRep has nothing to train"):
        run(FedRep, encoder=wholly_frozen)
    with pytest.raises(ConfigurationError, match="FedAS aligns and averages the encoder, but all of"):
        run(FedAS, encoder=wholly_frozen)
    with pytest.raises(ConfigurationError, match=r"'encoder\.\*' matches no .*frozen ones"):
        run(FedPAC, encoder=wholly_frozen)
    with pytest.raises(ConfigurationError, match=r"'encoder\.\*' matches no .*frozen ones"):
        FedEMA(wholly_frozen((6,)), 3)  # before a round, not in the second


def test_statistics_that_move_travel():
    def partly(input_shape):
        encoder = nn.Sequential(*normed_encoder(input_shape), nn.Linear(4, 4))
        encoder.out_features = 4
        encoder[1].requires_grad_(False)
        return encoder

    federation = run(FedAvg, encoder=partly, data=Toy(batch_size=9), limit_val_batches=0)
    assert {"encoder.1.weight", "encoder.1.bias"} == federation.models[0].frozen
    assert "encoder.1.running_mean" in federation.models[0].shared_names()


@pytest.mark.parametrize("method", [Ditto, APFL, FML, FedKD])
def test_batch_normalization_of_a_second_network_is_frozen_with_it(method):
    federation = run(partial(method, epochs=2), 2, encoder=wholly_frozen, data=Toy(batch_size=9))
    for name, value in whole_state(federation).items():
        if "running_mean" in name or "num_batches" in name:
            assert not value.any(), name
    assert not [name for name in federation.models[0].shared_names() if "running" in name]


def test_without_its_own_model_apfl_is_fedavg_on_a_frozen_encoder():
    data = {"encoder": wholly_frozen, "data": Toy(batch_size=9)}
    got, want = (run(method, 2, **data).server.broadcast(0, 2).weights for method in (partial(APFL, alpha=0.0), FedAvg))
    assert_same({name.removeprefix("global_model."): value for name, value in got.items()}, dict(want), atol=1e-6)


def test_statistics_of_further_components_are_kept_without_weights():
    def fixed(input_shape):
        encoder = nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 4), nn.Tanh())
        encoder[0].running_mean.fill_(3.0)
        encoder.out_features = 4
        return encoder.requires_grad_(False)

    client = run(partial(FedEM, components=2, epochs=1), encoder=fixed).client_model(0)
    assert (client.encoder_1[0].running_mean == 3).all()
