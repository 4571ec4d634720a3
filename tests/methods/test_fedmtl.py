"""FedMTL against plain torch, with the whole W, Omega and the trace in every step."""

from functools import partial

import pytest
import torch
from _helpers.plain import batches, cross_entropy, first_net, named, put, sgd
from _helpers.project import Net, run_project
from _helpers.toy import (
    CLASSES,
    CLIENTS,
    Toy,
    assert_same,
    linear_encoder,
    normed_encoder,
    run,
    tiny_encoder,
    whole_state,
)

from pfl_lightning import FederatedLoop, SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedMTL, LocalOnly

LR, EPOCHS, LAM = 0.05, 2, 0.3
COHORTS = [[3, 0, 2], [1, 2], [0, 3], [0, 2]]
METHOD = partial(FedMTL, lr=LR, epochs=EPOCHS, lam=LAM)


def flat(model):
    return torch.cat([tensor.flatten() for tensor in model.values()])


def trace_of(columns):
    """tr(W Omega W^T) with Omega = (I - 11^T / m)^2, all matrices written out."""
    weights, m = torch.stack(columns, dim=1), len(columns)
    projection = torch.eye(m, dtype=weights.dtype) - torch.ones(m, m, dtype=weights.dtype) / m
    return torch.trace(weights @ (projection @ projection) @ weights.T)


def related(models, client):
    """The cross entropy and the trace, in which the client's own column is the network that trains."""

    def loss(net, inputs, labels):
        columns = [flat(model) for model in models]
        columns[client] = flat(dict(net.named_parameters()))
        return cross_entropy(net, inputs, labels) + LAM * trace_of(columns)

    return loss


def restate(data, cohorts, clients=CLIENTS):
    """Every client's model after the rounds."""
    models = [named(first_net())] * clients
    for round, cohort in enumerate(cohorts):
        trained = {}
        for client in cohort:
            net = first_net()
            put(net, models[client])
            steps = batches(data, client, round, "fit/0", EPOCHS)
            sgd(net, steps, list(net.parameters()), LR, related(models, client))
            trained[client] = named(net)
        for client, model in trained.items():  # the columns of a round are seen in the next
            models[client] = model
    return models


def test_rounds_equal_the_restatement():
    data = Toy()
    federation = run(METHOD, len(COHORTS), cohorts=COHORTS, data=data)
    models = restate(data, COHORTS)
    for client in range(CLIENTS):
        assert_same(named(federation.client_model(client)), models[client], atol=2e-6)
        others = [models[other] for other in range(CLIENTS) if other != client]
        mean = {name: torch.stack([model[name] for model in others]).mean(0) for name in others[0]}
        assert_same(dict(federation.server.broadcast(client, 9).weights), mean, atol=2e-6)


def test_the_case_is_not_trivial():
    alone = run(partial(LocalOnly, lr=LR, epochs=EPOCHS), len(COHORTS), cohorts=COHORTS)
    models = restate(Toy(), COHORTS)
    assert float((models[0]["head.weight"] - named(alone.client_model(0))["head.weight"]).abs().max()) > 0.01
    assert float((models[0]["head.weight"] - models[2]["head.weight"]).abs().max()) > 0.01
    assert_same(models[4], named(first_net()), atol=0)  # never trained, and a column all the same


@pytest.mark.parametrize("m", [2, 3, 7])
def test_the_distance_to_the_mean_of_the_others_has_the_gradient_of_the_trace(m):
    columns = list(torch.randn(m, 11, generator=torch.Generator().manual_seed(m), dtype=torch.float64))
    columns[0].requires_grad_()
    (gradient,) = torch.autograd.grad(trace_of(columns), columns[0])
    torch.testing.assert_close(gradient, 2 * (columns[0] - sum(columns) / m).detach())
    (got,) = torch.autograd.grad((1 - 1 / m) * (columns[0] - sum(columns[1:]) / (m - 1)).square().sum(), columns[0])
    torch.testing.assert_close(got, gradient)


@pytest.mark.parametrize("cohorts", [COHORTS, [[0]]])
def test_without_the_trace_it_is_local_training(cohorts):
    alone = run(partial(LocalOnly, lr=LR, epochs=EPOCHS), 3, cohorts=cohorts)
    held = run(partial(METHOD, lam=0.0), 3, cohorts=cohorts)
    for client in range(CLIENTS):
        assert_same(named(held.client_model(client)), named(alone.client_model(client)))


def test_a_client_that_is_alone_trains_locally():
    data = Toy([[0] * 6 + [1] * 6])
    alone, held = (run(m, 2, data=data, cohorts=[[0]]) for m in (partial(LocalOnly, lr=LR, epochs=EPOCHS), METHOD))
    assert_same(named(held.client_model(0)), named(alone.client_model(0)))


def test_novel_clients_have_no_column():
    data = Toy(novel_clients=2)
    federation = run(METHOD, 2, data=data, loop=FederatedLoop())
    models = [named(federation.client_model(client)) for client in data.participating]
    mean = {name: torch.stack([model[name] for model in models]).mean(0) for name in models[0]}
    assert_same(federation.server.mean.as_state(), mean, atol=1e-6)
    assert_same(dict(federation.server.broadcast(data.novel[0], 2).weights), mean, atol=1e-6)
    assert_same(named(federation.client_model(data.novel[0])), named(first_net()), atol=0)


@pytest.mark.parametrize("engine", [VectorizedEngine, TrainerEngine])
@pytest.mark.parametrize("options", [{}, {"fine_tune": "all"}], ids=["plain", "fine-tuned"])
def test_engines_agree(engine, options):
    method = partial(METHOD, **options)
    one, many = (run(method, 3, cohorts=COHORTS, engine=engine) for engine in (None, engine()))
    assert_same(whole_state(many), whole_state(one), atol=1e-5)


@pytest.mark.parametrize("engine", [SequentialEngine, TrainerEngine, VectorizedEngine])
def test_a_module_of_its_author_equals_the_restatement(engine):
    federation, _ = run_project(
        FedMTL, len(COHORTS), module=Net(LR), cohorts=COHORTS, engine=engine(), epochs=EPOCHS, lam=LAM
    )
    for client, model in enumerate(restate(Toy(), COHORTS)):
        own = federation.client_model(client).named_parameters()
        got = {n.replace("body.", "encoder.").replace("fc.", "head."): p.detach() for n, p in own}
        assert_same(got, model, atol=2e-6)


def test_a_fine_tuning_is_without_the_trace():
    options = {"fine_tune": "all", "fine_tune_epochs": 2}
    scores = [run(partial(METHOD, lam=lam, **options), 0).test_scores for lam in (0.0, 50.0)]
    assert scores[0] == scores[1]


def test_running_statistics_are_not_in_w():
    federation = run(METHOD, 2, encoder=normed_encoder, data=Toy(batch_size=9))
    assert "encoder.1.weight" in federation.server.models.initial
    assert "encoder.1.running_mean" not in federation.server.models.initial
    means = [federation.client_model(client).state_dict()["encoder.1.running_mean"] for client in (0, 1)]
    assert not torch.equal(*means)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": -1.0}, "lam .lambda. must be"),
        ({"eval_model": "aggregated"}, "eval_model of FedMTL must be one of"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedMTL(tiny_encoder((6,)), CLASSES, **options)


def test_encoders_must_be_equal():
    with pytest.raises(ConfigurationError, match="FedMTL needs the same shapes"):
        run(METHOD, 1, encoder=[tiny_encoder, linear_encoder])
