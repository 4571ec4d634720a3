"""FedDyn against plain torch, and what its gradients add up to."""

from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, cross_entropy, first_net, mean_of, named, put, sgd
from _helpers.toy import CLIENTS, Toy, assert_same, normed_encoder, run, tiny_encoder, whole_state

from pfl_lightning import VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedDyn

LR, EPOCHS, ALPHA = 0.05, 2, 0.3
COHORTS = [[0, 2, 3], [1, 2], [0, 2]]  # client 4 never takes part
METHOD = partial(FedDyn, lr=LR, epochs=EPOCHS, alpha=ALPHA)


def dynamic(gradient, sent):
    """F(w) - <g_k, w> + alpha / 2 ||w - w^t||^2."""

    def loss(net, inputs, labels):
        pairs = [(p, gradient[name], sent[name]) for name, p in net.named_parameters()]
        linear = sum((g * p).sum() for p, g, _ in pairs)
        return cross_entropy(net, inputs, labels) - linear + ALPHA / 2 * sum(((p - w) ** 2).sum() for p, _, w in pairs)

    return loss


def restate(data):
    """The global model and every g_k after the rounds; the server's step is from the mean of all g_k."""
    net = first_net()
    gradients = [{name: 0 * value for name, value in named(net).items()} for _ in range(CLIENTS)]
    for round, cohort in enumerate(COHORTS):
        sent, trained = named(net), []
        for client in cohort:
            local = copy_of(net)
            loss = dynamic(gradients[client], sent)
            sgd(local, batches(data, client, round, "fit/0", EPOCHS), list(local.parameters()), LR, loss)
            trained.append(named(local))
            gradients[client] = {n: g - ALPHA * (trained[-1][n] - sent[n]) for n, g in gradients[client].items()}
        mean, h = mean_of(trained, [1] * len(cohort)), mean_of(gradients, [1] * CLIENTS)
        put(net, {name: mean[name] - h[name] / ALPHA for name in mean})
    return named(net), gradients


def own_gradients(federation, client):
    state = federation.clients.personal.get(client)
    return {n.removeprefix("gradient.").replace("/", "."): g for n, g in state.items() if n.startswith("gradient.")}


def test_rounds_equal_the_restatement():
    data = Toy()
    federation = run(METHOD, len(COHORTS), cohorts=COHORTS, data=data)
    model, gradients = restate(data)
    assert_same(named(federation.client_model(1)), model, atol=1e-6)
    for client in range(CLIENTS):
        assert_same(own_gradients(federation, client), gradients[client], atol=1e-6)


def test_h_is_the_mean_of_all_gradients_also_where_an_update_is_refused():
    class Refused(FedDyn):
        def make_update(self, context, before):
            update = super().make_update(context, before)
            return type(update)(**{**vars(update), "num_samples": 0 if context.client == 2 else update.num_samples})

    with pytest.warns(UserWarning, match="left out of the aggregation: client 2"):
        federation = run(partial(Refused, lr=LR, epochs=1), 2, cohorts=COHORTS)
    gradients = [own_gradients(federation, client) for client in range(CLIENTS)]
    assert_same(federation.server.h.as_state(), mean_of(gradients, [1] * CLIENTS), atol=1e-6)
    assert max(float(g.abs().max()) for g in gradients[2].values()) == 0.0


def test_engines_agree():
    one, many = (run(METHOD, 2, cohorts=COHORTS, engine=engine) for engine in (None, VectorizedEngine()))
    assert_same(whole_state(many), whole_state(one), atol=1e-5)


def test_statistics_are_averaged_and_no_gradient_is_kept_of_them():
    data = Toy([[0] * 6 + [1] * 6, [1] * 4 + [2] * 4], batch_size=4)
    federation = run(METHOD, 2, cohorts=[[0, 1], [0, 1]], data=data, encoder=normed_encoder)
    weights, h = federation.server.weights.as_state(), federation.server.h.as_state()
    assert {name for name in weights if "running" in name or "tracked" in name} == weights.keys() - h.keys()
    assert float(weights["encoder.1.running_var"].min()) > 0


def test_a_personalization_and_an_export_know_nothing_of_the_gradients():
    federation = run(partial(METHOD, fine_tune="head"), 2, cohorts=COHORTS)
    assert_same(federation.server.h.as_state(), run(METHOD, 2, cohorts=COHORTS).server.h.as_state())
    assert not [name for name in federation.client_model(0).exported_names() if "gradient" in name]


def test_alpha_is_above_zero():
    with pytest.raises(ConfigurationError, match="alpha must be a finite number above 0"):
        FedDyn(tiny_encoder((6,)), 5, alpha=0.0)
    assert torch.isfinite(torch.tensor(ALPHA))
