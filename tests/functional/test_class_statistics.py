import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_lightning.functional import ClassStatistics, feature_variance, weighted_class_means


def draw(samples, classes, features, offset=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(samples, features, generator=generator, dtype=torch.float64) + offset
    return values, torch.randint(classes, (samples,), generator=generator)


def accumulate(values, labels, classes, **options):
    statistics = ClassStatistics(classes, values.shape[1], **options)
    statistics.update(values, labels)
    return statistics


def assert_equals_numpy(statistics, values, labels, tolerance=1e-9):
    for y in range(statistics.num_classes):
        rows = values.numpy()[labels.numpy() == y]
        assert statistics.counts[y] == len(rows)
        if len(rows) == 0:
            assert not statistics.means[y].any()
            assert statistics.square_deviations[y] == 0
        else:
            np.testing.assert_allclose(statistics.means[y].numpy(), rows.mean(0), rtol=1e-14, atol=tolerance)
            expected = ((rows - rows.mean(0)) ** 2).sum()
            np.testing.assert_allclose(statistics.square_deviations[y].item(), expected, rtol=1e-10, atol=tolerance)
        if len(rows) < 2:
            assert not statistics.covariances[y].any()
        else:
            expected = np.atleast_2d(np.cov(rows, rowvar=False, ddof=1))
            np.testing.assert_allclose(statistics.covariances[y].numpy(), expected, rtol=0, atol=tolerance)


@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    offset=st.sampled_from([0.0, -7.0, 1e4, 1e6]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_any_split_merges_to_the_whole(labels, cuts, offset, seed):
    labels = torch.tensor(labels)
    values, _ = draw(len(labels), 4, 3, offset, seed)
    edges = [0, *sorted(min(cut, len(labels)) for cut in cuts), len(labels)]
    merged, streamed = ClassStatistics(5, 3), ClassStatistics(5, 3)
    parts = []
    for low, high in itertools.pairwise(edges):
        parts.append(accumulate(values[low:high], labels[low:high], 5))
        streamed.update(values[low:high], labels[low:high])
    assert merged.merge(*parts) is merged
    assert_equals_numpy(merged, values, labels)
    assert_equals_numpy(streamed, values, labels)
    assert torch.equal(merged.counts, streamed.counts)


def test_large_offsets_cost_no_accuracy():
    # Sums of raw squares would leave no correct digit here: 1e8 squared takes all sixteen of a double.
    values, labels = draw(500, 2, 4)
    shifted = values + 1e8
    values = shifted - 1e8  # what of the small values survived the addition
    statistics = ClassStatistics(2, 4)
    for low in range(0, 500, 50):
        statistics.merge(accumulate(shifted[low : low + 50], labels[low : low + 50], 2))
    reference = accumulate(values, labels, 2)
    torch.testing.assert_close(statistics.covariances, reference.covariances, rtol=0, atol=1e-7)
    assert feature_variance(statistics) > 0


def test_means_are_exact_to_the_last_digits_at_large_offsets():
    values, labels = draw(5000, 2, 2, offset=1e8)
    means = accumulate(values, labels, 2).means
    for y in range(2):
        rows = values[labels == y]
        exact = [math.fsum(column) / len(rows) for column in rows.T.tolist()]
        np.testing.assert_allclose(means[y].numpy(), exact, rtol=0, atol=2 * math.ulp(1e8))


def test_merging_leaves_the_others_alone_and_takes_empty_ones():
    values, labels = draw(20, 3, 2)
    first, second = accumulate(values[:10], labels[:10], 3), accumulate(values[10:], labels[10:], 3)
    before = (second.counts, second.means, second.covariances)
    first.merge(second, ClassStatistics(3, 2))
    after = (second.counts, second.means, second.covariances)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert first.counts.sum() == 20


def test_results_do_not_alias_the_accumulator():
    values, labels = draw(20, 3, 2)
    statistics = accumulate(values, labels, 3)
    for name in ("counts", "means", "square_deviations", "covariances"):
        before = getattr(statistics, name).clone()
        getattr(statistics, name).fill_(-1)
        assert torch.equal(getattr(statistics, name), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_features_are_summed_in_double(dtype):
    values, labels = draw(400, 3, 4, offset=50.0)
    values = values.to(dtype)
    statistics = accumulate(values.requires_grad_(), labels.to(torch.int32), 3)
    assert statistics.means.dtype == torch.float64
    assert not statistics.means.requires_grad
    assert_equals_numpy(statistics, values.detach().double(), labels)


def test_covariances_are_optional():
    values, labels = draw(30, 3, 4)
    lean, full = accumulate(values, labels, 3, with_covariances=False), accumulate(values, labels, 3)
    assert torch.equal(lean.means, full.means)
    assert torch.equal(lean.square_deviations, full.square_deviations)
    with pytest.raises(RuntimeError, match="with_covariances=True"):
        _ = lean.covariances
    with pytest.raises(ValueError, match="same kind"):
        full.merge(lean)


def test_fedpac_statistics_equal_the_formulas():
    values, labels = draw(60, 3, 4, offset=2.0)
    labels[labels == 1] = 0  # class 1 absent
    labels[0] = 3  # class 3 has one sample
    labels[1:][labels[1:] == 3] = 2
    statistics = accumulate(values, labels, 5, with_covariances=False)
    mean_rows, variance = weighted_class_means(statistics), feature_variance(statistics)
    expected_variance = 0.0
    for y in range(5):
        rows = values.numpy()[labels.numpy() == y]
        share = len(rows) / 60
        if len(rows) == 0:
            assert not mean_rows[y].any()
            continue
        mu = rows.mean(0)
        second_moment = sum(np.outer(f, f) for f in rows) / len(rows)
        np.testing.assert_allclose(mean_rows[y].numpy(), share * mu, atol=1e-12)
        expected_variance += share * np.trace(second_moment) - share**2 * mu @ mu  # eq. (44), literally
    np.testing.assert_allclose(variance.item(), expected_variance, rtol=1e-12)


def test_variance_of_one_repeated_sample_is_zero():
    values = torch.full((9, 3), 1e5 / 3)
    variance = feature_variance(accumulate(values, torch.zeros(9, dtype=torch.long), 2))
    assert 0.0 <= variance.item() <= 1e-15


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long), r"shape \(N, 3\), got torch.float32 of shape \(2, 4\)"),
        (torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, dtype=torch.long), "floating point"),
        (torch.zeros(2, 3), torch.zeros(1, dtype=torch.long), r"integers of shape \(2,\)"),
        (torch.zeros(2, 3), torch.zeros(2), "integers"),
        (torch.zeros(2, 3), torch.tensor([0, 2]), r"0\.\.1, got values from 0 to 2"),
        (torch.zeros(2, 3), torch.tensor([-1, 0]), r"0\.\.1, got values from -1 to 0"),
        (torch.tensor([[0.0] * 3, [0.0, float("nan"), 0.0]]), torch.tensor([0, 1]), r"1 samples, first \[1\]"),
        (torch.tensor([[float("inf")] * 3, [-float("inf")] * 3]), torch.tensor([1, 1]), r"2 samples"),
    ],
)
def test_bad_batches_are_refused_and_change_nothing(features, labels, message):
    statistics = ClassStatistics(2, 3)
    statistics.update(torch.ones(1, 3), torch.tensor([1]))
    with pytest.raises(ValueError, match=message):
        statistics.update(features, labels)
    assert statistics.counts.tolist() == [0, 1]
    assert statistics.means.tolist() == [[0.0] * 3, [1.0] * 3]


def test_other_bad_input():
    with pytest.raises(ValueError, match="at least one class"):
        ClassStatistics(0, 3)
    with pytest.raises(ValueError, match="same kind"):
        ClassStatistics(2, 3).merge(ClassStatistics(3, 3))
    empty = ClassStatistics(2, 3)
    empty.update(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    with pytest.raises(ValueError, match="at least one sample"):
        weighted_class_means(empty)
    with pytest.raises(ValueError, match="at least one sample"):
        feature_variance(empty)
