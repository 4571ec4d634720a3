"""FedLC against plain torch."""

import math
from functools import partial

import pytest
import torch
from _helpers.plain import batches, copy_of, first_net, mean_of, named, put, sgd
from _helpers.toy import Toy, assert_same, run, tiny_encoder, whole_state
from hypothesis import given
from hypothesis import strategies as st

from pfl_lightning import VectorizedEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.methods import FedLC
from pfl_lightning.methods.fedlc import calibrated_loss

LR, EPOCHS, TAU = 0.05, 2, 0.7
COHORTS = [[0, 2, 3], [1, 2], [0, 4]]
METHOD = partial(FedLC, lr=LR, epochs=EPOCHS, tau=TAU)


def slow_loss(scores, labels, counts, tau):
    """The paper's loss, sample by sample and class by class."""
    losses = []
    for row, label in zip(scores, labels.tolist(), strict=True):
        powers = [torch.exp(row[c] - tau * n ** (-1 / 4)) if n else 0.0 for c, n in enumerate(counts)]
        losses.append(-torch.log(powers[label] / sum(powers)))
    return sum(losses) / len(losses)


@given(st.lists(st.integers(0, 300), min_size=2, max_size=6).filter(any), st.floats(0, 5), st.integers(0, 2**20))
def test_the_loss(counts, tau, seed):
    generator = torch.Generator().manual_seed(seed)
    present = [c for c, n in enumerate(counts) if n]
    labels = torch.tensor(present)[torch.randint(len(present), (4,), generator=generator)]
    scores = torch.randn(4, len(counts), generator=generator, dtype=torch.float64)
    got = calibrated_loss(scores, labels, torch.tensor(counts, dtype=torch.float64), tau)
    assert float(got) == pytest.approx(float(slow_loss(scores, labels, counts, tau)), abs=1e-9)


def test_a_class_that_is_missing_gets_no_gradient():
    scores = torch.zeros(1, 3, requires_grad=True)
    calibrated_loss(scores, torch.tensor([0]), torch.tensor([5.0, 2.0, 0.0]), 1.0).backward()
    assert scores.grad[0, 2] == 0
    assert math.isclose(float(scores.grad.sum()), 0, abs_tol=1e-6)


def restate(data):
    """The global model after the rounds."""
    net = first_net()
    for round, cohort in enumerate(COHORTS):
        trained = []
        for client in cohort:
            local, own = copy_of(net), torch.bincount(data.tensors(client)[1], minlength=5).tolist()

            def loss(model, inputs, labels, own=own):
                return slow_loss(model(inputs), labels, own, TAU)

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


def test_tau_is_no_negative_number():
    with pytest.raises(ConfigurationError, match="tau must be a finite number of at least 0"):
        FedLC(tiny_encoder((6,)), 5, tau=-1.0)
