"""FedNTD against plain torch."""

from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, cross_entropy, first_net, mean_of, named, put, sgd
from _helpers.toy import Toy, assert_same, run, tiny_encoder, whole_state
from torch.nn import functional as F

from pfl_lightning import VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.methods import FedAvg, FedNTD
from pfl_lightning.methods.fedntd import not_true_scores

LR, EPOCHS, BETA, TAU = 0.05, 2, 0.7, 2.0
COHORTS = [[0, 2, 3], [1, 2], [0, 4]]
METHOD = partial(FedNTD, lr=LR, epochs=EPOCHS, beta=BETA, temperature=TAU)


def distilled(teacher):
    """L_CE + beta KL(q^g || q^l) over the classes that a sample does not have, by a mask for each sample."""

    def loss(net, inputs, labels):
        divergences = []
        for row, own, label in zip(net(inputs), teacher(inputs).detach(), labels.tolist(), strict=True):
            others = torch.arange(len(row)) != label
            local, received = (F.log_softmax(found[others] / TAU, dim=0) for found in (row, own))
            divergences.append((received.exp() * (received - local)).sum())
        return cross_entropy(net, inputs, labels) + BETA * sum(divergences) / len(divergences)

    return loss


def restate(data):
    """The global model after the rounds."""
    net = first_net()
    for round, cohort in enumerate(COHORTS):
        trained = []
        for client in cohort:
            local = copy_of(net)
            loss = distilled(copy_of(net))
            sgd(local, batches(data, client, round, "fit/0", EPOCHS), list(local.parameters()), LR, loss)
            trained.append(named(local))
        put(net, mean_of(trained, [len(data.labels[client]) for client in cohort]))
    return named(net)


def test_rounds_equal_the_restatement():
    data = Toy()
    federation = run(METHOD, len(COHORTS), cohorts=COHORTS, data=data)
    assert_same(named(federation.client_model(1)), restate(data), atol=2e-6)


def test_engines_agree():
    one, many = (run(METHOD, 2, cohorts=COHORTS, engine=engine) for engine in (None, VectorizedEngine()))
    assert_same(whole_state(many), whole_state(one), atol=1e-5)


def test_without_weight_it_is_fedavg():
    ours, plain = run(partial(METHOD, beta=0.0), 2), run(partial(FedAvg, lr=LR, epochs=EPOCHS), 2)
    assert_same(ours.server.weights.as_state(), plain.server.weights.as_state(), atol=1e-7)


def test_scores_of_the_other_classes():
    scores, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 2])
    expected = [row[torch.arange(5) != label] for row, label in zip(scores, labels, strict=True)]
    assert torch.equal(not_true_scores(scores, labels), torch.stack(expected))


def test_two_classes_have_nothing_to_distill():
    with pytest.raises(ConfigurationError, match="needs at least 3 classes, got 2"):
        FedNTD(tiny_encoder((6,)), 2).check_run(RunFacts(5, 1))
    FedNTD(tiny_encoder((6,)), 2, beta=0.0).check_run(RunFacts(5, 1))
