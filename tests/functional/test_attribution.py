"""Conductance against its closed form and its definition; ranks against scipy's."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from pfl_lightning.functional import layer_conductance, rank_correlation, rank_scores


def networks(head):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh()).double()
    return encoder, head.double()


def test_conductance_of_a_linear_head_is_weight_times_the_change_of_the_unit():
    encoder, head = networks(nn.Linear(5, 3))
    inputs, labels = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 2, 1, 2])
    got = layer_conductance(encoder, head, inputs, labels, steps=3)
    with torch.no_grad():
        change = encoder(inputs) - encoder(torch.zeros_like(inputs))
    torch.testing.assert_close(got, head.weight[labels].detach() * change)


@pytest.mark.parametrize("baseline", [0.0, -0.5])
def test_conductance_of_any_head_follows_its_definition(baseline):
    """The published definition, input by input: dF/dz_j dz_j/dx_i (x_i - x'_i), by the midpoint rule on a fine grid."""
    encoder, head = networks(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    x, label = torch.randn(1, 6, dtype=torch.float64), 2
    start = torch.full_like(x, baseline)
    fine, expected = 400, torch.zeros(5, dtype=torch.float64)
    for step in range(fine):
        point = start + (step + 0.5) / fine * (x - start)
        units = encoder(point).detach().requires_grad_(True)
        (by_unit,) = torch.autograd.grad(head(units)[0, label], units)
        by_input = torch.autograd.functional.jacobian(lambda p: encoder(p)[0], point)[:, 0]  # (units, inputs)
        expected += by_unit[0] * (by_input * (x - start)).sum(dim=1) / fine
    got = layer_conductance(encoder, head, x, torch.tensor([label]), steps=200, baseline=baseline)
    torch.testing.assert_close(got[0], expected, atol=1e-5, rtol=0)


def test_conductances_add_up_to_the_change_of_the_score():
    encoder, head = networks(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    inputs, labels = torch.randn(7, 6, dtype=torch.float64), torch.arange(7) % 3
    got = layer_conductance(encoder, head, inputs, labels, steps=100).sum(dim=1)
    with torch.no_grad():
        scores = [head(encoder(x)).gather(1, labels[:, None])[:, 0] for x in (inputs, torch.zeros_like(inputs))]
    torch.testing.assert_close(got, scores[0] - scores[1], atol=1e-4, rtol=0)


def test_conductance_leaves_no_gradients_behind():
    encoder, head = networks(nn.Linear(5, 3))
    with torch.no_grad():
        got = layer_conductance(encoder, head, torch.randn(2, 6, dtype=torch.float64), torch.tensor([0, 1]))
    assert not got.requires_grad
    assert all(p.grad is None for module in (encoder, head) for p in module.parameters())
    with pytest.raises(ValueError, match="steps must be at least 1"):
        layer_conductance(encoder, head, torch.randn(2, 6), torch.tensor([0, 1]), steps=0)


def test_ranks_and_their_correlations():
    rng = np.random.default_rng(0)
    values = np.round(rng.normal(size=(4, 9)), 1)  # with ties
    expected = (stats.rankdata(values, axis=1) - 1) / 8
    np.testing.assert_allclose(rank_scores(torch.from_numpy(values)).numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(
        rank_correlation(torch.from_numpy(values)).numpy(), stats.spearmanr(values, axis=1).statistic, atol=1e-12
    )


def test_ranks_without_an_order():
    assert rank_scores(torch.tensor([[3.0]])).tolist() == [[0.5]]
    assert rank_scores(torch.ones(2, 4)).tolist() == [[0.5] * 4] * 2
    assert rank_correlation(torch.stack([torch.ones(4), torch.arange(4.0)]))[0].isnan().all()
