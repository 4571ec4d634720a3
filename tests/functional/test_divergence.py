"""Calibre's divergence rate, and the weights that the server makes of it."""

import math

import pytest
import torch
from _helpers.kmeans_references import digit_encodings
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.datasets import make_blobs

from pfl_lightning.functional import divergence_rate, fit_kmeans, inverse_divergence_weights

rates = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8)


def slow_rate(values, labels, centroids):
    """The mean over clusters of the mean distance of their members."""
    means = []
    for cluster, centroid in enumerate(centroids):
        own = [math.dist(row, centroid) for row, label in zip(values, labels, strict=True) if label == cluster]
        if own:
            means.append(sum(own) / len(own))
    return sum(means) / len(means)


def test_equals_a_slow_loop_over_clusters_of_scikit_learn():
    sizes = [5, 80, 20, 40]  # of unequal weight, so that the mean over samples would be another
    values, _ = make_blobs(sizes, n_features=6, cluster_std=[0.2, 0.5, 1.0, 0.1], random_state=0)
    reference = KMeans(4, n_init=10, random_state=0).fit(values)
    expected = slow_rate(values.tolist(), reference.labels_.tolist(), reference.cluster_centers_.tolist())
    assert divergence_rate(torch.tensor(values), 4).item() == pytest.approx(expected, rel=1e-6)


def test_is_that_of_the_clustering_of_real_encodings():
    values = digit_encodings()[:300]
    found = fit_kmeans(values, 10, generator=torch.Generator().manual_seed(3))
    expected = slow_rate(values.tolist(), found.assignment.tolist(), found.centroids.tolist())
    rate = divergence_rate(values, generator=torch.Generator().manual_seed(3))
    assert rate.item() == pytest.approx(expected, rel=1e-5)
    half = divergence_rate(values.to(torch.bfloat16), generator=torch.Generator().manual_seed(3))
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(expected, rel=0.05)


def test_clusters_without_members_are_left_out():
    values = torch.tensor([[0.0, 0.0], [8.0, 6.0]], dtype=torch.float64).repeat(6, 1)
    assert divergence_rate(values, 4).item() == pytest.approx(0.0, abs=1e-12)
    values = torch.tensor([[0.0, 0.0], [0.0, 2.0], [100.0, 0.0]], dtype=torch.float64)
    assert divergence_rate(values, 2).item() == pytest.approx(0.5)  # one at a distance of 1 on both sides, and none


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("number", [3, 10, 60])
def test_encodings_that_agree_or_are_no_more_than_the_clusters_have_the_rate_zero(number, dtype):
    """Not that of the rounding, whose inverse would be the weight of the server's whole model."""
    for seed in range(20):
        generator = torch.manual_seed(seed)
        values = (torch.relu(torch.randn(min(number, 10), 512, generator=generator)) + 0.3).to(dtype)
        values = values if number <= 10 else values[:7].repeat(9, 1)  # of seven kinds
        assert divergence_rate(values, min(number, 10), generator=generator).item() == 0.0
    near = torch.rand(1, 64, dtype=dtype, generator=generator).repeat(20, 1)
    near[::3] = torch.nextafter(near[::3], torch.ones(())) if dtype != torch.bfloat16 else near[::3]
    assert divergence_rate(near, 10, generator=generator).item() == 0.0


def test_rejects_fewer_encodings_than_clusters():
    with pytest.raises(ValueError, match="10 clusters need at least as many points, got 9"):
        divergence_rate(torch.zeros(9, 3))


@given(rates)
def test_weights_are_the_shares_of_the_inverses(values):
    weights = inverse_divergence_weights(values)
    assert weights.dtype == torch.float64
    total = sum(1 / value for value in values)
    assert weights.tolist() == pytest.approx([1 / value / total for value in values])
    assert torch.equal(inverse_divergence_weights(torch.tensor(values, dtype=torch.float64)), weights)


@given(rates, st.sampled_from([math.nan, math.inf]), st.integers(0, 8))
def test_a_rate_that_is_not_finite_has_no_weight(values, wrong, place):
    place = min(place, len(values))
    weights = inverse_divergence_weights([*values[:place], wrong, *values[place:]]).tolist()
    assert weights.pop(place) == 0.0
    assert weights == pytest.approx(inverse_divergence_weights(values).tolist())


@given(rates)
def test_a_rate_of_zero_counts_as_the_smallest(values):
    weights = inverse_divergence_weights([0.0, *values])
    assert torch.equal(weights, inverse_divergence_weights([min(values), *values]))


def test_defined_where_the_formula_is_not():
    assert inverse_divergence_weights([0.0, 0.0]).tolist() == [0.5, 0.5]
    assert inverse_divergence_weights([math.inf, 0.0, math.nan]).tolist() == [0.0, 1.0, 0.0]
    assert inverse_divergence_weights([5e-324, 1e308]).tolist() == [1.0, 0.0]
    assert inverse_divergence_weights([1e-310, 1e-310]).tolist() == [0.5, 0.5]
    assert inverse_divergence_weights(torch.tensor([1, 3])).tolist() == [0.75, 0.25]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], r"shape \(m,\) with m >= 1, got \(0,\)"),
        (torch.ones(2, 1), r"got \(2, 1\)"),
        ([1.0, -0.5], r"cannot be negative, got \[1.0, -0.5\]"),
        ([math.nan, math.inf], "no divergence rate is finite"),
    ],
)
def test_rejects_bad_rates(values, message):
    with pytest.raises(ValueError, match=message):
        inverse_divergence_weights(values)
