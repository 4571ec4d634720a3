"""pFedSim against plain torch."""

import math
from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, first_net, mean_of, named, put, sgd
from _helpers.toy import CLIENTS, Toy, assert_same, own_model, run, whole_state
from torch.nn import functional as F

from pfl_lightning import VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, PFedSim

LR, EPOCHS = 0.05, 2
COHORTS = [[0, 2, 3], [1, 2], [0, 2, 4], [0, 1, 2]]
METHOD = partial(PFedSim, lr=LR, epochs=EPOCHS)


def mixed(net, own, models):
    """The encoder that a client gets, and its own head."""
    weights, encoders = [], []
    for other in models:
        rows = zip(own.head.weight, other.head.weight, strict=True)
        cosine = sum(float(F.cosine_similarity(a, b, dim=0)) for a, b in rows) / len(own.head.weight)
        weights.append(-math.log(1 - min(max(cosine, 0.0), 0.9999)))
        encoders.append(named(other, "encoder."))
    local = copy_of(own)
    put(local, mean_of(encoders, weights))
    return local


def restate(warmup):
    """The global model and the clients' own ones after the rounds."""
    data, net, models = Toy(), first_net(), {}
    for round, cohort in enumerate(COHORTS):
        trained = {}
        for client in cohort:
            local = mixed(net, models[client], models.values()) if client in models else copy_of(net)
            sgd(local, batches(data, client, round, "fit/0", EPOCHS), list(local.parameters()), LR)
            trained[client] = local
        if round < warmup:
            put(net, mean_of([named(one) for one in trained.values()], [len(data.labels[k]) for k in trained]))
        else:
            models |= trained
    return net, models


@pytest.mark.parametrize(("warmup", "rounds"), [(0.5, 2), (2, 2), (0.0, 0), (0.3, 1)])
def test_rounds_equal_the_restatement(warmup, rounds):
    method = partial(METHOD, warmup=warmup)
    net, models = restate(rounds)
    trained = run(method, len(COHORTS), cohorts=COHORTS)
    begun = run(partial(method, eval_model="aggregated"), len(COHORTS), cohorts=COHORTS)
    assert_same(trained.server.weights.as_state(), named(net), atol=1e-6)
    for client in range(CLIENTS):
        expected = mixed(net, models[client], models.values()) if client in models else net
        assert_same(own_model(begun, client).state_dict(), named(expected), atol=2e-6)
        if client in models:
            assert_same(own_model(trained, client).state_dict(), named(models[client]), atol=2e-6)


def test_some_clients_differ_and_some_do_not_mix():
    """What the comparison is made on: several weights, and some of zero."""
    _, models = restate(0)
    heads = [F.normalize(models[client].head.weight.detach(), dim=1) for client in sorted(models)]
    cosines = torch.stack([torch.stack([(a * b).sum(1).mean() for b in heads]) for a in heads])
    assert cosines.min() < 0.99


def test_with_a_warm_up_to_the_end_it_is_fedavg():
    ours, plain = (
        run(method, 2, cohorts=COHORTS) for method in (partial(METHOD, warmup=1), partial(FedAvg, lr=LR, epochs=EPOCHS))
    )
    assert_same(ours.server.weights.as_state(), plain.server.weights.as_state())


def test_opposite_heads_do_not_mix():
    federation = run(partial(METHOD, warmup=0), 1)
    server = federation.server
    mine, other = (server.models.get(client) for client in (0, 1))
    for client in range(2, CLIENTS):
        server.models.set(client, {**other, "head.weight": -mine["head.weight"]})
    server.models.set(1, {**other, "head.weight": -mine["head.weight"]})
    assert_same(server.broadcast(0, 1).weights, dict(mine), atol=1e-7)


def test_equal_heads_mix_evenly():
    server = run(partial(METHOD, warmup=0), 1).server
    own = {name: tensor.clone() for name, tensor in server.models.get(0).items()}
    models = [{**server.models.get(client), "head.weight": own["head.weight"]} for client in range(CLIENTS)]
    for client, model in enumerate(models):
        server.models.set(client, model)
    sent = server.broadcast(0, 1).weights
    mean = mean_of(models, [1] * CLIENTS)
    expected = {name: mean[name] if name.startswith("encoder.") else own[name] for name in own}
    assert_same(dict(sent), expected, atol=1e-6)


def test_engines_agree():
    method = partial(METHOD, warmup=1 / 3)
    one, many = (run(method, 3, cohorts=COHORTS, engine=engine) for engine in (None, VectorizedEngine()))
    assert_same(whole_state(many), whole_state(one), atol=1e-5)


def test_a_share_of_a_run_without_end_is_refused():
    with pytest.raises(ConfigurationError, match=r"warmup=0\.5 of pFedSim is a share of the planned rounds"):
        run(METHOD, -1, max_time="00:00:00:01")


@pytest.mark.parametrize("warmup", [-1, 2.5])
def test_arguments_that_are_refused(warmup):
    with pytest.raises(ConfigurationError, match="warmup must be"):
        run(partial(METHOD, warmup=warmup))
