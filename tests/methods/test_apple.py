"""APPLE against plain torch, whose gradients of cores and relationships are written out."""

import math
from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, cross_entropy, first_net, named, put
from _helpers.toy import CLIENTS, Toy, assert_same, normed_encoder, own_model, run, tiny_encoder, whole_state

from pfl_lightning import FederatedLoop, VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import APPLE

LR, RATE, EPOCHS, MU, ROUNDS, DECAY = 0.3, 0.02, 2, 0.7, 2, 5e-4
COHORTS = [[0, 2, 3], [1, 2], [0, 4], [2, 3]]
METHOD = partial(APPLE, lr=LR, epochs=EPOCHS, relationship_lr=RATE, mu=MU, proximal_rounds=ROUNDS)


def mixed(cores, p):
    return {name: sum(w * core[name] for w, core in zip(p, cores, strict=True)) for name in cores[0]}


def fit(net, cores, client, p, steps, momentum, strength):
    """Steps of the client's core along p_ii g, and of p along the inner products <g, c_j>, g the gradient at w_i."""
    cores, p0 = [dict(core) for core in cores], torch.full((len(cores),), 1 / len(cores))
    velocity, velocity_p = {name: 0 * value for name, value in cores[0].items()}, torch.zeros(len(cores))
    for inputs, labels in steps:
        put(net, mixed(cores, p))
        gradients = torch.autograd.grad(cross_entropy(net, inputs, labels), list(net.parameters()))
        g = dict(zip(cores[0], gradients, strict=True))
        slope = torch.stack([sum((g[name] * core[name]).sum() for name in g) for core in cores])
        slope = slope + strength * (p - p0)
        velocity_p = momentum * velocity_p + slope + DECAY * LR / RATE * (p - p0)  # decay of z = (p - p_0) / scale
        own = cores[client]
        velocity = {name: momentum * v + p[client] * g[name] + DECAY * own[name] for name, v in velocity.items()}
        cores[client] = {name: value - LR * velocity[name] for name, value in own.items()}
        p = p - RATE * velocity_p
    return cores[client], p


def restate(data, cohorts, momentum=0.5, clients=CLIENTS):
    """Every client's core and relationships after the rounds."""
    start = first_net()
    cores, ps = [named(start)] * clients, [torch.full((clients,), 1 / clients)] * clients
    for round, cohort in enumerate(cohorts):
        strength = MU * (math.cos(math.pi * round / ROUNDS) + 1) / 2 if round < ROUNDS else 0.0
        trained = {}
        for client in cohort:
            steps = batches(data, client, round, "fit/0", EPOCHS)
            trained[client] = fit(copy_of(start), cores, client, ps[client], steps, momentum, strength)
        for client, (core, p) in trained.items():  # the cores of a round are seen in the next
            cores[client], ps[client] = core, p
    return cores, ps


def relationships(federation, client):
    z = federation.clients.personal.get(client)["relationships"]
    return 1 / len(z) + math.sqrt(RATE / LR) * z


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_rounds_equal_the_restatement(momentum):
    data = Toy()
    federation = run(partial(METHOD, momentum=momentum), len(COHORTS), cohorts=COHORTS, data=data)
    cores, ps = restate(data, COHORTS, momentum)
    for client in range(CLIENTS):
        assert_same(federation.server.cores.get(client), cores[client], atol=2e-6)
        torch.testing.assert_close(relationships(federation, client), ps[client], rtol=0, atol=2e-6)
        got = {n: p for n, p in named(own_model(federation, client)).items() if n != "relationships"}
        assert_same(got, mixed(cores, ps[client]), atol=3e-6)


def test_the_case_is_not_trivial():
    data = Toy()
    cores, ps = restate(data, COHORTS)
    assert float((ps[2] - 1 / CLIENTS).abs().max()) > 0.01
    assert float((cores[2]["head.weight"] - cores[0]["head.weight"]).abs().max()) > 0.01
    assert torch.equal(ps[1], restate(data, COHORTS[:2])[1][1])  # outside of the cohort nothing changes


def test_a_rate_of_0_keeps_relationships_and_one_client_has_its_core_alone():
    federation = run(partial(METHOD, relationship_lr=0.0), 2, cohorts=COHORTS)
    models = [named(own_model(federation, client)) for client in range(CLIENTS)]
    mean = mixed([federation.server.cores.get(client) for client in range(CLIENTS)], [1 / CLIENTS] * CLIENTS)
    for model in models:
        assert_same({n: p for n, p in model.items() if n != "relationships"}, mean, atol=1e-6)


def test_novel_clients_get_the_mean_of_all_cores_and_have_none():
    data = Toy(novel_clients=2)
    federation = run(METHOD, 2, data=data, loop=FederatedLoop())
    broadcast = federation.server.broadcast(data.novel[0], 2)
    assert broadcast.members.tolist() == list(data.participating)
    mean = mixed([federation.server.cores.get(k) for k in data.participating], [1 / 3] * 3)
    got = named(own_model(federation, data.novel[0]))
    assert_same({n: p for n, p in got.items() if n != "relationships"}, mean, atol=1e-6)
    z = federation.clients.personal.get(data.participating[0])["relationships"]
    assert not z[list(data.novel)].any()
    assert z[list(data.participating)].all()


@pytest.mark.parametrize("options", [{}, {"fine_tune": "all"}], ids=["plain", "fine-tuned"])
def test_engines_agree(options):
    method = partial(METHOD, **options)
    one, many = (run(method, 3, cohorts=COHORTS, engine=engine) for engine in (None, VectorizedEngine()))
    assert_same(whole_state(many), whole_state(one), atol=1e-5)
    for client, score in one.test_scores.items():
        assert many.test_scores[client].loss == pytest.approx(score.loss, abs=1e-4)


def test_trained_models_are_the_same_mixtures():
    """A client's core is on the server as it was trained."""
    one, other = (run(partial(METHOD, eval_model=which), 2, cohorts=COHORTS) for which in ("aggregated", "trained"))
    assert other.test_scores == one.test_scores


def test_running_statistics_stay_on_the_client():
    data = Toy([[0] * 6 + [1] * 6, [1] * 4 + [2] * 4], batch_size=4)
    federation = run(METHOD, 2, cohorts=[[0, 1]], data=data, encoder=normed_encoder)
    assert "encoder.1.weight" in federation.server.cores.initial
    assert "encoder.1.running_mean" not in federation.server.cores.initial
    means = [own_model(federation, client).state_dict()["encoder.1.running_mean"] for client in (0, 1)]
    assert not torch.equal(*means)


def test_an_export_has_the_model_alone():
    federation = run(METHOD, 1)
    assert {name.partition(".")[0] for name in federation.client_model(0).exported_names()} == {"encoder", "head"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"relationship_lr": -1.0}, "relationship_lr must be"),
        ({"lr": 0.0}, "lr .relationship_lr is divided by it. must be"),
        ({"mu": -1.0}, "mu must be"),
        ({"proximal_rounds": -1}, "proximal_rounds .L. must be"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises((ConfigurationError, ValueError), match=message):
        APPLE(tiny_encoder((6,)), 5, **options)


def test_several_encoders_are_refused():
    with pytest.raises(ConfigurationError, match="APPLE mixes models of one encoder, got several"):
        run(METHOD, 1, encoder=[tiny_encoder, lambda shape: tiny_encoder(shape)])
