"""FedDBE against plain torch."""

import copy
from functools import partial

import pytest
import torch
from _helpers.plain import batches, cross_entropy, first_net, mean_of, named, put, sgd
from _helpers.toy import (
    CLIENTS,
    FEATURES,
    Toy,
    assert_same,
    normed_encoder,
    run,
    tiny_encoder,
    whole_state,
)
from torch import nn
from torch.nn import functional as F

from pfl_lightning import VectorizedEngine
from pfl_lightning.client import Phase
from pfl_lightning.methods import FedAvg, FedDBE, FedPer
from pfl_lightning.methods.feddbe import FedDBEUpdate

LR, EPOCHS, KAPPA, MOMENTUM = 0.05, 2, 3.0, 0.4
COHORTS = [[0, 2, 3], [1, 2], [0, 2]]  # client 4 never takes part
METHOD = partial(FedDBE, lr=LR, epochs=EPOCHS, kl_weight=KAPPA, mean_momentum=MOMENTUM)


def dbe_loss(own, running, consensus):
    """The loss of a batch; ``running`` is the running mean so far, a list of one."""

    def loss(net, inputs, labels):
        features = net.encoder(inputs)
        mean = (1 - MOMENTUM) * running[0] + MOMENTUM * features.mean(0)
        running[0] = mean.detach()
        if consensus is None:
            return cross_entropy(net, inputs, labels) + 0 * own.sum()
        distance = KAPPA * (0.5 * (mean - consensus) ** 2).mean()
        return F.cross_entropy(net.head(features + own), labels) + distance

    return loss


def restate(data, first_round, personal_head):
    """The server's model, the mean for all, every client's own mean, and every client's head."""
    net, consensus = first_net().double(), None
    own = [nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64)) for _ in range(CLIENTS)]
    heads = [copy.deepcopy(net.head) for _ in range(CLIENTS)]
    for round, cohort in enumerate(COHORTS):
        trained, means, sizes = [], [], [len(data.labels[client]) for client in cohort]
        for client in cohort:
            local, running = copy.deepcopy(net), [torch.zeros(FEATURES, dtype=torch.float64)]
            if personal_head:
                local.head = heads[client]
            steps = ((x.double(), y) for x, y in batches(data, client, round, "fit/0", EPOCHS))
            sgd(local, steps, [*local.parameters(), own[client]], LR, dbe_loss(own[client], running, consensus))
            trained.append(named(local, "encoder" if personal_head else ""))
            means.append({"mean": running[0]})
        if consensus is not None or first_round == "average":
            put(net, mean_of(trained, sizes))
        if consensus is None:
            consensus = mean_of(means, sizes)["mean"]
    return net, consensus, own, heads


@pytest.mark.parametrize(("first_round", "personal_head"), [("discard", False), ("average", False), ("average", True)])
def test_three_rounds_equal_the_restatement(first_round, personal_head):
    data = Toy()
    method = partial(METHOD, first_round=first_round, personal_head=personal_head)
    federation = run(method, 3, cohorts=COHORTS, data=data, precision="64-true", limit_val_batches=0)
    net, consensus, own, heads = restate(data, first_round, personal_head)
    shared = named(net, "encoder" if personal_head else "")
    assert_same(federation.server.weights.as_state(), shared, 1e-9)
    torch.testing.assert_close(federation.server.global_mean, consensus, rtol=0, atol=1e-9)
    for client in range(CLIENTS):
        stored = federation.personal.get(client)
        torch.testing.assert_close(stored["client_mean"], own[client].detach(), rtol=0, atol=1e-9)
        if personal_head:
            torch.testing.assert_close(stored["head.weight"], heads[client].weight.detach(), rtol=0, atol=1e-9)
    inputs = data.tensors(2, "test")[0].double()
    head = heads[2] if personal_head else net.head
    torch.testing.assert_close(federation.client_model(2).eval()(inputs), head(net.encoder(inputs) + own[2]))


class FrozenMean(FedDBE):
    """The client's mean stays at zero."""

    def phases(self):
        return (Phase("fit", ("encoder.*", "head.*"), self.epochs),)


@pytest.mark.parametrize(("personal_head", "method"), [(False, FedAvg), (True, FedPer)])
def test_without_weight_and_mean_it_is_fedavg_or_fedper(personal_head, method):
    options = {"personal_head": personal_head, "kl_weight": 0.0, "first_round": "average"}
    own = run(partial(FrozenMean, lr=LR, epochs=1, **options), 2, cohorts=COHORTS)
    other = run(partial(method, lr=LR, epochs=1), 2, cohorts=COHORTS)
    assert_same(own.server.weights.as_state(), other.server.weights.as_state())


def test_the_first_round_finds_the_mean_alone():
    federation = run(METHOD, 1, cohorts=COHORTS)
    server = federation.server
    assert_same(server.weights.as_state(), named(first_net()))
    assert not server.collecting
    assert float(server.global_mean.abs().max()) > 0
    assert all(bool((federation.personal.get(k)["client_mean"] == 0).all()) for k in range(CLIENTS))
    later = run(METHOD, 3, cohorts=COHORTS)
    assert torch.equal(later.server.global_mean, server.global_mean)  # it stays
    assert all(bool((later.personal.get(k)["client_mean"] != 0).any()) for k in (0, 1, 2))


def test_a_full_momentum_takes_the_batch_alone():
    client = FedDBE(tiny_encoder((6,)), 5, kl_weight=2.0)
    client.active.fill_(1)
    client.running_mean.fill_(7.0)
    features = torch.randn(3, FEATURES)
    terms = client.loss_terms(features, torch.tensor([0, 1, 2]))
    expected = 2.0 * (0.5 * features.mean(0) ** 2).mean()
    torch.testing.assert_close(terms["mean_regularization"], expected)
    torch.testing.assert_close(client.running_mean, features.mean(0))


def test_vectorized_with_batch_normalization():
    data = partial(Toy, [[0] * 6 + [1] * 6, [1] * 6 + [2] * 6, [0] * 6 + [3] * 6])
    one, many = (
        run(METHOD, 3, cohorts=[[0, 1, 2]], data=data(), encoder=normed_encoder, engine=engine)
        for engine in (None, VectorizedEngine(forward="vmap"))
    )
    assert_same(whole_state(many), whole_state(one), atol=1e-5)


def test_what_travels_and_what_stays():
    federation = run(METHOD, 1, cohorts=COHORTS)
    sent = federation.server.broadcast(0, 1)
    assert sent.bytes_by_kind()["statistics"] == 4 * FEATURES
    assert {name.split(".")[0] for name in sent.weights} == {"encoder", "head"}
    assert set(federation.personal.get(0)) == {"client_mean"}


def test_novel_clients_and_fine_tuning():
    data = Toy(novel_clients=1)
    method = partial(METHOD, fine_tune="head", fine_tune_epochs=2, fine_tune_lr=0.3)
    federation = run(method, 2, cohorts=[[0, 2], [1, 2]], data=data)
    tuned, weights = named(federation.client_model(data.novel[0])), federation.server.weights.as_state()
    assert torch.equal(tuned["encoder.0.weight"], weights["encoder.0.weight"])
    assert not torch.equal(tuned["head.weight"], weights["head.weight"])
    assert bool((tuned["client_mean"] != 0).any())
    assert bool((federation.personal.get(data.novel[0])["client_mean"] == 0).all())


def test_a_mean_is_expected_in_the_first_round_alone():
    server = METHOD(tiny_encoder((6,)), 5).configure_aggregator(3)
    weights = {name: tensor.clone() for name, tensor in server.weights.as_state().items()}
    update = partial(FedDBEUpdate, client=0, round=0, num_samples=3, weights=weights)
    with pytest.raises(Exception, match="local_mean is missing"):
        server.check(update())
    with pytest.raises(Exception, match=r"local_mean has shape \(7,\), expected \(4,\)"):
        server.check(update(local_mean=torch.zeros(7)))
    server.receive(update(local_mean=torch.ones(FEATURES)))
    server.aggregate()
    with pytest.raises(Exception, match="local_mean is not expected"):
        server.check(update(local_mean=torch.zeros(FEATURES)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_weight": -1.0}, r"kl_weight \(kappa\) must be a finite number of at least 0"),
        ({"mean_momentum": 0.0}, "mean_momentum must be a finite number above 0"),
        ({"mean_momentum": 1.5}, "mean_momentum must be between 0 and 1"),
        ({"first_round": "keep"}, "first_round must be one of"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedDBE(tiny_encoder((6,)), 5, **options)
