"""DC-PFL where numbers fail: covariances that cannot be decomposed, and a head that is not finite."""

import dataclasses
from functools import partial

import pytest
import torch
from _helpers.toy import Toy, assert_same, run, tiny_encoder

from pfl_lightning.client import FitContext
from pfl_lightning.errors import ClientError
from pfl_lightning.fit.data import FitData
from pfl_lightning.methods import DCPFL

ROUND = 3


def build(**options):
    torch.manual_seed(0)
    client = DCPFL(tiny_encoder((6,)), 5, **({"server_lr": 0.1} | options))
    return client, client.configure_aggregator(5)


def upload(client, number):
    data = Toy()
    data.setup()
    return client.make_update(FitContext(number, ROUND, FitData(data.client_data(number).train, 4)), None)


def fail_at(monkeypatch, *calls):
    """The given calls of the decomposition, from 0, do not converge."""
    original, seen = torch.linalg.eigh, []

    def eigh(matrix):
        seen.append(matrix)
        if len(seen) - 1 in calls:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return original(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)


def test_a_client_whose_covariance_cannot_be_decomposed_says_so(monkeypatch):
    client, _ = build()
    fail_at(monkeypatch, 1)
    expected = r"client 2, round 4: a class covariance .* \(the algorithm failed to converge\); .* \(factors=False\)"
    with pytest.raises(ClientError, match=expected):
        upload(client, 2)
    fail_at(monkeypatch, 0)
    assert upload(build(factors=False)[0], 2).covariances is not None  # decomposes nothing


def test_that_client_is_left_out_and_the_others_go_on(monkeypatch):
    """Clients 0, 1 and 3 decompose 2, 3 and 2 matrices: the fifth is the last of client 1."""
    expected = run(partial(DCPFL, epochs=1), cohorts=[[0, 3]])
    fail_at(monkeypatch, 4)
    with pytest.warns(UserWarning, match="left out of the aggregation: client 1, round 1: a class covariance"):
        got = run(partial(DCPFL, epochs=1), cohorts=[[0, 1, 3]])
    assert_same(*(dict(of.server.broadcast(0, 1).weights) for of in (got, expected)))


def test_a_server_that_cannot_decompose_leaves_the_calibration_out(monkeypatch):
    """The head is that of the steps on class means alone; the global means are taken over."""
    (client, server), (_, plain) = build(), build(virtual_features=0)
    updates = [upload(client, number) for number in (0, 2)]
    for update in updates:
        server.receive(update)
        plain.receive(dataclasses.replace(update, factors=None, ranks=None))
    before = server.head.weight.clone()
    plain.aggregate()
    fail_at(monkeypatch, 2)
    with pytest.warns(UserWarning, match=r"round 4: the head is not calibrated .* failed to converge"):
        server.aggregate()
    assert_same(server.state_dict(), plain.state_dict())
    assert not torch.equal(server.head.weight, before)
    assert server.present.tolist() == [True, True, True, True, False]


def test_a_head_that_became_non_finite_is_not_taken_over():
    """Finite but absurd statistics: the server says so and goes on from the head that it had."""
    client, server = build()
    huge = dataclasses.replace(upload(client, 0), factors=1e30 * upload(client, 0).factors)
    before = server.broadcast(0, ROUND).weights
    server.receive(huge)
    with pytest.warns(UserWarning, match="round 4: the server's head is kept as it was, since its new values"):
        server.aggregate()
    assert_same(server.broadcast(0, ROUND).weights, before)
