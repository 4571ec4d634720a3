"""The server of Calibre: the mean with weights by divergence, and what it refuses."""

from functools import partial

import pytest
import torch
from _helpers.toy import SMALL_SIMCLR, assert_same, tiny_encoder

from pfl_lightning.errors import InvalidMessageError
from pfl_lightning.functional import inverse_divergence_weights, weighted_average
from pfl_lightning.methods import Calibre
from pfl_lightning.methods.calibre import CalibreUpdate, DivergenceAwareAggregator

FIT = partial(Calibre, objective=SMALL_SIMCLR, clusters=3)


def make_update(client, divergence, scale, like):
    weights = {name: torch.full_like(tensor, scale) for name, tensor in like.items()}
    return CalibreUpdate(client=client, round=0, num_samples=3, weights=weights, divergence=torch.as_tensor(divergence))


@pytest.mark.parametrize(
    "rates",
    [[0.5, 0.1, 3.0], [0.0, 0.2, 0.4], [0.7, 0.0, 0.0], [0.0, 0.0, 0.0], [1e-30, 1e-20, 1.0], [2.0, 1e-42, 1.0]],
)
def test_the_mean_has_the_weights_by_divergence(rates):
    client = FIT(tiny_encoder((6,)), 5)
    server = DivergenceAwareAggregator(client, 3)
    like = server.weights.as_state()
    for _ in range(2):  # nothing of the first round is left in the second
        updates = [make_update(k, rate, 10.0**k, like) for k, rate in enumerate(rates)]
        for update in updates:
            server.receive(update)
        server.aggregate()
    weights = inverse_divergence_weights([0.0 if rate == 1e-42 else rate for rate in rates])  # next to nothing is zero
    assert_same(server.weights.as_state(), weighted_average([u.weights for u in updates], weights), atol=1e-4)
    before = {name: tensor.clone() for name, tensor in server.weights.as_state().items()}
    server.aggregate()
    assert_same(server.weights.as_state(), before)


@pytest.mark.parametrize(
    ("divergence", "message"),
    [
        (-0.5, r"client 1, round 1: CalibreUpdate.divergence is -0.5, expected at least 0"),
        (float("nan"), r"client 1, round 1: CalibreUpdate.divergence holds 1 non-finite"),
        ([0.5, 0.5], r"client 1, round 1: CalibreUpdate.divergence has shape \(2,\), expected \(\)"),
    ],
)
def test_a_rate_without_meaning_is_refused(divergence, message):
    server = DivergenceAwareAggregator(FIT(tiny_encoder((6,)), 5), 3)
    like = server.weights.as_state()
    server.receive(make_update(0, 0.5, 2.0, like))
    with pytest.raises(InvalidMessageError, match=message):
        server.check(make_update(1, divergence, 5.0, like))
    server.aggregate()
    assert all(bool((tensor == 2).all()) for tensor in server.weights.as_state().values())
