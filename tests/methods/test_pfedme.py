"""pFedMe against plain torch and closed forms."""

from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, cross_entropy, first_net, mean_of, named, put, score
from _helpers.toy import CLIENTS, Toy, assert_same, normed_encoder, own_model, run, tiny_encoder, whole_state
from torch import nn

from pfl_lightning import TrainerEngine, VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedAvg, PFedMe

LAM, ETA, INNER, EPOCHS = 5.0, 0.1, 0.15, 2
COHORTS = [[0, 2, 3], [1, 2]]
METHOD = partial(PFedMe, lam=LAM, lr=ETA, inner_lr=INNER, inner_steps=3, epochs=EPOCHS)
READINGS = {
    "default": {},
    "restart": {"restart": True},
    "inner weight decay": {"inner_weight_decay": 0.1},
    "server step": {"beta": 0.5},
}


def restate(*, restart=False, inner_weight_decay=0.0, beta=1.0):
    """w and every client's theta after the rounds; ``None`` for clients that never trained."""
    data, net, thetas = Toy(), first_net(), [None] * CLIENTS
    for round, cohort in enumerate(COHORTS):
        trained = []
        for client in cohort:
            w, theta = named(net), copy_of(net)
            for inputs, labels in batches(data, client, round, "fit/0", EPOCHS):
                if restart:
                    put(theta, w)
                for _ in range(3):
                    gradients = torch.autograd.grad(cross_entropy(theta, inputs, labels), list(theta.parameters()))
                    old = named(theta)
                    slopes = {
                        name: g + LAM * (old[name] - w[name]) + inner_weight_decay * old[name]
                        for name, g in zip(old, gradients, strict=True)
                    }
                    put(theta, {name: old[name] - INNER * slopes[name] for name in old})
                w = {name: p - ETA * LAM * (p - named(theta)[name]) for name, p in w.items()}
            thetas[client] = theta
            trained.append(w)
        mean = mean_of(trained, [len(data.labels[client]) for client in cohort])
        put(net, {name: (1 - beta) * p + beta * mean[name] for name, p in named(net).items()})
    return net, thetas


@pytest.mark.parametrize("options", READINGS.values(), ids=READINGS)
def test_rounds_equal_the_restatement(options):
    data = Toy()
    federation = run(partial(METHOD, **options), 2, cohorts=COHORTS, data=data)
    net, thetas = restate(**options)
    assert_same(federation.server.weights.as_state(), named(net), atol=1e-6)
    for client, theta in enumerate(thetas):
        expected = theta or net
        assert_same(named(own_model(federation, client)), named(expected), atol=1e-6)
        got = federation.test_scores[client]
        assert (got.accuracy, got.loss) == pytest.approx(score(expected, data, client, "test"), abs=1e-5)


@pytest.mark.parametrize("lam", [0.5, 15.0])
def test_one_inner_step_of_rate_one_over_lambda_is_fedavg(lam):
    """theta = w - grad f(w) / lambda, and w moves by eta lambda (w - theta) = eta grad f(w), for every lambda."""
    options = {"cohorts": COHORTS, "precision": "64-true", "limit_val_batches": 0}
    method = partial(PFedMe, lam=lam, inner_lr=1 / lam, inner_steps=1, restart=True, lr=ETA, epochs=1)
    got = run(method, 2, **options).server.weights.as_state()
    fedavg = partial(FedAvg, lr=ETA, momentum=0.0, weight_decay=0.0, epochs=1)
    assert_same(got, run(fedavg, 2, **options).server.weights.as_state(), atol=1e-9)


def test_a_server_that_takes_no_step_keeps_w():
    federation = run(partial(METHOD, beta=0.0), 1)
    assert_same(federation.server.weights.as_state(), named(first_net()))
    assert not torch.equal(own_model(federation, 0).head.bias, first_net().head.bias)


class Quadratic(PFedMe):
    """f(theta) = 1/2 (theta - a)'A(theta - a) in place of the network's loss, theta the head's bias, a the inputs'."""

    curve = torch.diag(torch.arange(1.0, 6.0, dtype=torch.float64))

    def _loss_at(self, inputs, labels, params, own_buffers=False):
        away = params["head.bias"] - inputs.mean(0)
        return away @ self.curve @ away / 2 + 0 * sum(p.sum() for p in params.values())


def step_on_quadratic(**options):
    encoder = nn.Linear(5, 5)
    encoder.out_features = 5
    client = Quadratic(encoder, 5, **{"lr": 0.02, **options}).double()
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    client.before_fit(None)
    output = client.training_step((inputs, torch.zeros(6, dtype=torch.int64)), 0)
    output["loss"].backward()
    return client, inputs.mean(0), output


def test_many_inner_steps_on_a_quadratic_find_the_proximal_point():
    """theta = (A + lambda I)^-1 (A a + lambda w); the loss is the Moreau envelope, its gradient lambda (w - theta)."""
    client, a, output = step_on_quadratic(lam=LAM, inner_lr=0.15, inner_steps=200)
    w, curve = client.head.bias.detach(), client.curve
    point = torch.linalg.solve(curve + LAM * torch.eye(5, dtype=torch.float64), curve @ a + LAM * w)
    torch.testing.assert_close(client.theta.as_state()["head.bias"], point)
    torch.testing.assert_close(client.head.bias.grad, LAM * (w - point))
    envelope = (point - a) @ curve @ (point - a) / 2 + LAM / 2 * (w - point).square().sum()
    torch.testing.assert_close(output["loss"].detach(), envelope)


def test_a_large_lambda_holds_theta_at_w():
    distances = []
    for lam in (1e1, 1e3, 1e5):
        client, _, _ = step_on_quadratic(lam=lam, lr=0.5 / lam, inner_lr=0.5 / lam, inner_steps=50)
        distances.append(float((client.theta.as_state()["head.bias"] - client.head.bias.detach()).norm()))
    assert distances[0] > 10 * distances[1] > 100 * distances[2] > 0


@pytest.mark.parametrize("engine", [TrainerEngine, partial(VectorizedEngine, forward="vmap")])
def test_every_engine_gives_the_same_with_batch_normalization(engine):
    options = {"cohorts": COHORTS, "encoder": normed_encoder, "precision": "64-true"}
    made = [run(partial(METHOD, epochs=1), 2, engine=e, data=Toy(batch_size=9), **options) for e in (engine(), None)]
    assert_same(*map(whole_state, made), atol=1e-9)
    assert int(own_model(made[0], 0).encoder[1].num_batches_tracked) == 2  # they move once a step


def test_what_is_stored_and_evaluated():
    """theta of the last fit, one model a client, the statistics of batch normalization its own; or w."""
    data = Toy(novel_clients=1)
    federation = run(METHOD, 1, data=data, cohorts=[range(3)])
    novel = data.novel[0]
    assert_same(named(own_model(federation, novel)), federation.server.weights.as_state())
    stored = federation.personal.get(data.participating[0])
    assert set(stored) == set(federation.server.weights.as_state())
    assert not torch.equal(stored["head.bias"], federation.server.weights.as_state()["head.bias"])
    plain = run(partial(METHOD, eval_model="aggregated"), 1, data=Toy(novel_clients=1), cohorts=[range(3)])
    assert_same(plain.server.weights.as_state(), federation.server.weights.as_state())
    assert_same(named(own_model(plain, data.participating[0])), plain.server.weights.as_state())


def test_fine_tuning_begins_at_theta():
    federation = run(partial(METHOD, fine_tune="head", fine_tune_lr=0.0), 1, cohorts=[[1]], limit_val_batches=0)
    assert_same(named(federation.client_model(1)), named(own_model(federation, 1)))
    client = own_model(federation, 1)
    client.phase = client.personalization_phases()[0]
    inputs, labels = Toy().tensors(1)
    terms = client.training_step((inputs, labels), 0)
    torch.testing.assert_close(terms["loss"], cross_entropy(client, inputs, labels))


def test_own_normalization_weights_of_w_are_refused():
    """They would be those of theta at the next fit."""

    def encoder(shape):
        network = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        network.out_features = 4
        return network

    with pytest.raises(ConfigurationError, match=r'batch_norm="own": .* use "own_statistics"'):
        PFedMe(encoder((6,)), 5, batch_norm="own")
    PFedMe(encoder((6,)), 5, batch_norm="own_statistics")
    PFedMe(tiny_encoder((6,)), 5, batch_norm="own")  # which has none


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": -1.0}, "lam"),
        ({"inner_steps": 0}, "inner_steps must be at least 1"),
        ({"inner_lr": -0.1}, "inner_lr"),
        ({"lam": 20.0, "inner_lr": 0.1}, r"inner_lr \* lam is 2, .* use an inner_lr below 0.1, such as 1 / lam = 0.05"),
        ({"lam": 10.0, "lr": 0.2}, r"lr \* lam is 2, .* use an lr below 0.2, or at most 1 / lam = 0.1"),
        ({"inner_weight_decay": -1.0}, "inner_weight_decay"),
        ({"beta": -0.5}, "beta must be a finite number of at least 0"),
    ],
)
def test_arguments_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PFedMe(tiny_encoder((6,)), 5, **options)
