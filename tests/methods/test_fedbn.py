"""FedBN (Li et al. 2021) against plain torch: the mean of everything but batch normalization."""

import warnings
from functools import partial

import pytest
import torch
from _helpers.plain import Net, batches, copy_of, mean_of, score, sgd
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    FEATURES,
    INPUTS,
    SEED,
    GivenCohorts,
    Toy,
    assert_same,
    normed_encoder,
    run,
    tiny_encoder,
)
from torch import nn

from pfl_lightning import SequentialEngine, TrainerEngine
from pfl_lightning.methods import FedAvg, FedBN
from pfl_lightning.seeding import derive_seed

EPOCHS, LR = 2, 0.05
EVERYBODY = list(range(CLIENTS))
COHORTS = {"all": [EVERYBODY, EVERYBODY], "partial": [[0, 2, 3], [1, 2]]}
# Batches of 4 leave none of one sample.
LABELS = (
    [0] * 6 + [1] * 5,
    [1] * 7 + [2] * 6 + [3] * 3,
    [0] * 4 + [2] * 5 + [3] * 5,
    [3] * 6 + [4] * 9,
    [0] * 3 + [1] * 4,
)
OWN = ["encoder.1.weight", "encoder.1.bias", "encoder.1.running_mean", "encoder.1.running_var"]
OWN.append("encoder.1.num_batches_tracked")
TRAVELS = ["encoder.0.weight", "encoder.0.bias", "head.weight", "head.bias"]


def state(net):
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items() if name in OWN + TRAVELS}


def restate(cohorts, data):
    """Every client's network after the rounds."""
    torch.manual_seed(derive_seed(SEED, "initial weights"))
    first = Net(normed_encoder)
    nets = [copy_of(first) for _ in EVERYBODY]
    for round, cohort in enumerate(cohorts):
        for client in cohort:
            net = nets[client].train()
            sgd(net, batches(data, client, round, "fit/0", EPOCHS), list(net.parameters()), LR)
        uploads = [{name: nets[client].state_dict()[name] for name in TRAVELS} for client in cohort]
        mean = mean_of(uploads, [len(data.labels[client]) for client in cohort])
        for net in nets:
            net.load_state_dict(mean, strict=False)
    return [net.eval() for net in nets]


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine])
@pytest.mark.parametrize("cohorts", COHORTS.values(), ids=COHORTS)
@pytest.mark.parametrize("rounds", [1, 2])
def test_rounds_equal_the_restatement(rounds, cohorts, engine):
    data = Toy(LABELS)
    method = partial(FedBN, lr=LR, epochs=EPOCHS)
    federation = run(method, rounds, cohorts=cohorts, data=data, encoder=normed_encoder, engine=engine())
    nets = restate(cohorts[:rounds], data)
    for client in EVERYBODY:
        assert_same(state(federation.client_model(client)), state(nets[client]), atol=5e-6)
        for part, scores in (("validation", federation.validation_scores), ("test", federation.test_scores)):
            found = (scores[client].accuracy, scores[client].loss)
            assert found == pytest.approx(score(nets[client], data, client, part), abs=1e-5)


def test_normalization_differs_between_clients_and_a_client_that_never_trained_keeps_the_first():
    data = Toy(LABELS)
    nets = restate(COHORTS["partial"], data)
    for name in OWN[:4]:
        states = [net.state_dict()[name] for net in nets]
        assert all(not torch.equal(states[0], other) for other in states[1:]), name
    assert torch.equal(nets[4].state_dict()["encoder.1.weight"], torch.ones(FEATURES))
    assert int(nets[4].state_dict()["encoder.1.num_batches_tracked"]) == 0
    average = run(partial(FedAvg, lr=LR, epochs=EPOCHS), 2, data=data, encoder=normed_encoder).client_model(0)
    own = run(partial(FedBN, lr=LR, epochs=EPOCHS), 2, data=data, encoder=normed_encoder).client_model(0)
    assert not torch.allclose(average.head.weight, own.head.weight, atol=1e-4)


def test_normalization_does_not_travel():
    client = FedBN(normed_encoder((INPUTS,)), CLASSES)
    assert client.shared_names() == TRAVELS
    assert sorted(client.personal_names()) == sorted(OWN)
    loop = GivenCohorts([0, 3])
    run(partial(FedBN, epochs=1), loop=loop, data=Toy(LABELS), encoder=normed_encoder, limit_val_batches=0)
    size = 4 * ((INPUTS + 1) * FEATURES + (FEATURES + 1) * CLASSES)
    assert loop.traffic.up == loop.traffic.down == {"weights": 2 * size}


def test_other_normalization_travels():
    """FedBN is about batch statistics: layer and group normalization have none."""
    encoder = nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.LayerNorm(FEATURES), nn.BatchNorm1d(FEATURES))
    encoder.out_features = FEATURES
    shared = FedBN(encoder, CLASSES).shared_names()
    assert "encoder.1.weight" in shared
    assert not any(name.startswith("encoder.2.") for name in shared)


def test_without_batch_normalization_it_is_fedavg_and_says_so():
    with pytest.warns(UserWarning, match="Sequential has no batch normalization: FedBN equals FedAvg"):
        own = run(partial(FedBN, lr=LR, epochs=1), encoder=tiny_encoder)
    average = run(partial(FedAvg, lr=LR, epochs=1), encoder=tiny_encoder)
    assert_same(dict(own.client_model(0).state_dict()), dict(average.client_model(0).state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FedBN(normed_encoder((INPUTS,)), CLASSES)


def test_arguments_without_meaning_are_refused():
    with pytest.raises(ValueError, match="epochs must be at least 1"):
        FedBN(normed_encoder((INPUTS,)), CLASSES, epochs=0)
    with pytest.raises(TypeError, match="mu"):
        FedBN(normed_encoder((INPUTS,)), CLASSES, mu=1.0)
