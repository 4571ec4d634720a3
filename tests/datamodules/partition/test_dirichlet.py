"""Dirichlet partitions: sizes, proportions, and that even the most extreme draws end."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_lightning.datamodules import DirichletOverClasses, DirichletOverClients, class_counts
from pfl_lightning.datamodules.counting import apportion, fill, round_rows, spread_offsets

fast = settings(max_examples=40, deadline=None, derandomize=True)


def shuffled_labels(num_classes: int, each: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(num_classes), each))


@fast
@given(
    num_clients=st.integers(1, 40),
    alpha=st.sampled_from([1e-4, 0.01, 0.1, 0.5, 1.0, 100.0]),
    minimum=st.integers(1, 12),
    seed=st.integers(0, 100),
)
def test_over_clients_assigns_everything_and_keeps_the_minimum(num_clients, alpha, minimum, seed):
    labels = shuffled_labels(5, 100)
    parts = DirichletOverClients(num_clients, alpha, min_samples=minimum, seed=seed).partition(labels)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(500))
    assert min(len(part) for part in parts) >= minimum


@pytest.mark.parametrize("seed", range(5))
def test_a_minimum_that_needs_every_sample_leaves_no_donor_short(seed):
    parts = DirichletOverClients(50, 0.1, min_samples=10, seed=seed).partition(shuffled_labels(5, 100))
    assert [len(part) for part in parts] == [10] * 50


@fast
@given(
    num_clients=st.integers(1, 40),
    alpha=st.sampled_from([1e-4, 0.01, 0.5, 100.0]),
    over_classes=st.booleans(),
    uneven=st.booleans(),
    seed=st.integers(0, 100),
)
def test_sizes_are_exact_even_when_every_sample_is_needed(num_clients, alpha, over_classes, uneven, seed):
    labels = np.repeat(np.arange(4), [1, 60, 400, 39] if uneven else [125] * 4)
    size = 500 // num_clients
    rule = DirichletOverClasses if over_classes else DirichletOverClients
    parts = rule(num_clients, alpha, samples_per_client=size, seed=seed).partition(labels)
    assert {len(part) for part in parts} == {size}
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything)


def test_over_classes_follows_the_draw_while_classes_last():
    labels = shuffled_labels(10, 5000)
    skewed, even = (
        class_counts(labels, DirichletOverClasses(20, alpha, samples_per_client=200).partition(labels), 10)
        for alpha in (0.05, 1000.0)
    )
    assert (skewed.max(axis=1) > 100).mean() > 0.6
    assert even.max() < 35
    assert even.min() > 10


def test_over_clients_splits_each_class_by_its_own_draw():
    labels = shuffled_labels(10, 1000)
    counts = class_counts(labels, DirichletOverClients(10, 1.0, seed=4).partition(labels), 10)
    # Shares of one class among ten clients have mean 0.1 and deviation sqrt(0.1 * 0.9 / 11) = 0.09.
    assert counts.sum(axis=0).tolist() == [1000] * 10
    assert 0.07 < (counts / 1000).std() < 0.11


def test_a_thousand_clients_take_less_than_a_second():
    labels = shuffled_labels(10, 6000)
    for rule in (DirichletOverClients(1000, 0.01), DirichletOverClasses(1000, 0.01)):
        start = time.perf_counter()
        rule.partition(labels)
        assert time.perf_counter() - start < 1.0  # some 0.03 s on an idle machine


@fast
@given(
    weights=st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=6),
    supply=st.lists(st.integers(0, 30), min_size=3, max_size=3),
    seed=st.integers(0, 100),
)
def test_fill_meets_every_size_within_the_supply(weights, supply, seed):
    total = sum(supply) // len(weights)
    sizes = np.full(len(weights), total)
    counts = fill(np.array(weights), sizes, np.array(supply), np.random.default_rng(seed))
    assert (counts >= 0).all()
    assert (counts.sum(axis=1) == total).all()
    assert (counts.sum(axis=0) <= supply).all()


@fast
@given(
    shares=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=8).filter(lambda shares: sum(shares) > 0.1),
    size=st.integers(0, 5000),
    offset=st.floats(0, 1, exclude_max=True),
)
def test_rounded_rows_keep_their_sum_and_stay_within_one(shares, size, offset):
    targets = np.tile(np.array(shares) / sum(shares) * size, (7, 1))
    counts = round_rows(targets, spread_offsets(7, offset))
    assert (counts.sum(axis=1) == size).all()
    assert np.abs(counts - targets).max() < 1 + 1e-5
    assert (counts[targets == 0] == 0).all()


@pytest.mark.parametrize(
    ("targets", "total", "low", "high", "expected"),
    [
        ([1.4, 1.4, 3.2], 6, [0, 0, 0], [9, 9, 9], [2, 1, 3]),
        ([0.2, 0.2, 5.6], 6, [1, 1, 1], [9, 9, 9], [1, 1, 4]),
        ([2.5, 2.5, 1.0], 6, [0, 0, 0], [2, 2, 1], [2, 2, 1]),  # the bounds allow no more than five
        ([0.5, 0.5, 0.0], 3, [0, 0, 0], [2, 2, 0], [2, 1, 0]),
    ],
)
def test_largest_remainders_with_bounds(targets, total, low, high, expected):
    counts = apportion(np.array([targets]), np.array([total]), np.array([low]), np.array([high]))
    assert counts.tolist() == [expected]
