import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_lightning.functional import ClassStatistics

CLASSES, FEATURES = 5, 3


def accumulate(values, labels, classes=CLASSES, **options):
    statistics = ClassStatistics(classes, values.shape[1], **options)
    statistics.update(values, labels)
    return statistics


def draw(labels, seed=0, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(FEATURES, FEATURES, generator=generator, dtype=torch.float64)
    return torch.randn(len(labels), FEATURES, generator=generator, dtype=torch.float64) @ mixing + offset


def split(labels, owners, clients, seed=0, offset=0.0):
    """Features and labels, whole and by client."""
    labels, owners = torch.tensor(labels), torch.tensor(owners)[: len(labels)]
    values = draw(labels, seed, offset)
    return values, labels, [(values[owners == k], labels[owners == k]) for k in range(clients)]


SPLITS = {
    "labels": st.lists(st.integers(0, 3), min_size=1, max_size=40),  # class 4 never comes
    "owners": st.lists(st.integers(0, 4), min_size=40, max_size=40),
    "seed": st.integers(0, 1000),
}


@given(offset=st.sampled_from([0.0, -7.0, 100.0]), **SPLITS)
@settings(max_examples=100, deadline=None)
def test_any_split_pools_to_the_whole(labels, owners, seed, offset):
    values, labels, parts = split(labels, owners, 5, seed, offset)
    pooled = ClassStatistics(CLASSES, FEATURES)
    for part in parts:
        sent = accumulate(*part)
        received = ClassStatistics.from_moments(sent.counts, sent.means, sent.covariances)
        torch.testing.assert_close(received.square_deviations, sent.square_deviations, rtol=0, atol=1e-9)
        pooled.merge(received)
    for y in range(CLASSES):
        rows = values.numpy()[labels.numpy() == y]
        assert pooled.counts[y] == len(rows)
        mean = rows.mean(0) if len(rows) > 0 else np.zeros(FEATURES)
        np.testing.assert_allclose(pooled.means[y].numpy(), mean, rtol=0, atol=1e-9)
        covariance = np.cov(rows, rowvar=False) if len(rows) > 1 else np.zeros((FEATURES, FEATURES))
        np.testing.assert_allclose(pooled.covariances[y].numpy(), covariance, rtol=0, atol=1e-9)


@given(**SPLITS)
@settings(max_examples=50, deadline=None)
def test_merging_is_the_pooling_of_dc_pfl(labels, owners, seed):
    _, _, parts = split(labels, owners, 5, seed)
    pooled, uploads = ClassStatistics(CLASSES, FEATURES), []
    for part in parts:
        sent = accumulate(*part)
        uploads.append((sent.counts.tolist(), sent.means.numpy(), sent.covariances.numpy()))
        pooled.merge(ClassStatistics.from_moments(sent.counts, sent.means, sent.covariances))
    for y in range(CLASSES):
        n_c = sum(counts[y] for counts, _, _ in uploads)
        assert pooled.counts[y] == n_c
        if n_c == 0:
            continue
        mu_c = sum(counts[y] * means[y] for counts, means, _ in uploads) / n_c  # eq. (10)
        np.testing.assert_allclose(pooled.means[y].numpy(), mu_c, rtol=0, atol=1e-9)
        if n_c == 1:
            continue
        total = -n_c * np.outer(mu_c, mu_c)
        for counts, means, covariances in uploads:
            if counts[y] > 0:
                total += (counts[y] - 1) * covariances[y] + counts[y] * np.outer(means[y], means[y])
        np.testing.assert_allclose(pooled.covariances[y].numpy(), total / (n_c - 1), rtol=0, atol=1e-9)  # eq. (11)


def test_single_precision_uploads_pool_to_single_precision():
    values, labels, parts = split([0, 1, 2, 3] * 25, list(range(5)) * 20, 5)
    pooled = ClassStatistics(CLASSES, FEATURES)
    for part in parts:
        sent = accumulate(*part)
        moments = (sent.counts.to(torch.int32), sent.means.float(), sent.covariances.float())
        received = ClassStatistics.from_moments(*moments)
        assert received.means.dtype == received.covariances.dtype == torch.float64
        pooled.merge(received)
    torch.testing.assert_close(pooled.covariances, accumulate(values, labels).covariances, rtol=0, atol=1e-5)


def test_square_deviations_in_place_of_covariances():
    values, labels, parts = split([0, 1, 2, 3, 3] * 8, list(range(5)) * 8, 5)
    whole = accumulate(values, labels, with_covariances=False)
    pooled = ClassStatistics(CLASSES, FEATURES, with_covariances=False)
    for part in parts:
        sent = accumulate(*part)
        moments = (sent.counts, sent.means)
        pooled.merge(ClassStatistics.from_moments(*moments, square_deviations=sent.square_deviations))
    assert not pooled.with_covariances
    torch.testing.assert_close(pooled.means, whole.means, rtol=0, atol=1e-12)
    torch.testing.assert_close(pooled.square_deviations, whole.square_deviations, rtol=1e-12, atol=1e-12)


def moments():
    """Class 0 has four samples, class 1 has one, class 2 none."""
    labels = torch.tensor([0, 0, 1, 0, 0])
    statistics = accumulate(draw(labels), labels, 3)
    return {"counts": statistics.counts, "means": statistics.means, "covariances": statistics.covariances}


def test_means_of_absent_classes_are_ignored_and_nothing_is_shared():
    arguments = moments()
    arguments["means"][2] = 3.0
    statistics = ClassStatistics.from_moments(**arguments)
    assert not statistics.means[2].any()
    before = (statistics.counts, statistics.means, statistics.covariances)
    for tensor in arguments.values():
        tensor.fill_(-1)
    statistics.merge(ClassStatistics.from_moments(**moments()))
    assert statistics.counts.tolist() == [8, 2, 0]
    assert torch.equal(statistics.means, before[1])
    assert before[0].tolist() == [4, 1, 0]


def test_small_asymmetry_is_rounding_and_removed():
    arguments = moments()
    arguments["covariances"][0, 0, 1] += 1e-7
    covariance = ClassStatistics.from_moments(**arguments).covariances[0]
    assert torch.equal(covariance, covariance.T)
    torch.testing.assert_close(covariance, moments()["covariances"][0], rtol=0, atol=1e-7)


def change(name, index, value):
    def apply(arguments):
        arguments[name][index] = value

    return apply


def replace(name, value):
    def apply(arguments):
        arguments[name] = value

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            change("covariances", (0, 0, 1), 100.0),
            r"class 0 \(4 samples\) .* got a largest entry of 100, an asymmetry of ",
        ),
        (change("covariances", (0, 1, 1), float("nan")), "the covariance of class 0 .* must be finite"),
        (change("covariances", (2, 1, 1), float("inf")), "the covariance of class 2 .* must be finite"),
        (
            change("covariances", (1, 1, 1), 0.5),
            "fewer than two samples; got a largest entry of 0.5",
        ),
        (change("covariances", (0, 2, 2), -2.0), "class 0 .* a smallest variance of -2"),
        (change("counts", 1, -3), "counts must not be negative, got -3 for class 1"),
        (change("means", (0, 2), float("nan")), r"means must be finite, got \[.*nan\] for class 0"),
        (replace("counts", torch.ones(3)), r"counts must be integers of shape \(3,\), got torch.float32"),
        (replace("counts", torch.ones(2, dtype=torch.long)), r"counts must be .*\(2,\)"),
        (replace("means", torch.zeros(3)), r"means must be floating point of shape \(classes, features\)"),
        (replace("covariances", torch.zeros(3, 3)), r"covariances must be .* shape \(3, 3, 3\), got .*\(3, 3\)"),
        (replace("covariances", None), "got neither"),
        (replace("square_deviations", torch.zeros(3)), "got both"),
    ],
)
def test_impossible_moments_are_refused(spoil, message):
    arguments = moments()
    spoil(arguments)
    with pytest.raises(ValueError, match=message):
        ClassStatistics.from_moments(**arguments)


@pytest.mark.parametrize(
    ("deviations", "message"),
    [
        ([1.0, 0.0, -1.0], r">= 0, got -1.0 for class 2"),
        ([float("nan"), 0.0, 0.0], r"finite and >= 0, got nan for class 0"),
        ([1.0, 2.0, 0.0], r"less than two samples is zero, got 2.0 for class 1"),
        ([1.0, 0.0], r"square_deviations must be .* shape \(3,\)"),
    ],
)
def test_impossible_square_deviations_are_refused(deviations, message):
    counts, means = moments()["counts"], moments()["means"]
    with pytest.raises(ValueError, match=message):
        ClassStatistics.from_moments(counts, means, square_deviations=torch.tensor(deviations))


def test_covariances_by_class_are_those_of_all():
    arguments = moments()
    whole = ClassStatistics.from_moments(**arguments)
    arguments["covariances"] = {0: arguments["covariances"][0]}
    part = ClassStatistics.from_moments(**arguments)
    assert torch.equal(part.covariances, whole.covariances)
    assert torch.equal(part.square_deviations, whole.square_deviations)
    arguments["covariances"][0].fill_(-1)  # nothing is shared
    assert torch.equal(part.covariances, whole.covariances)


def test_a_class_left_out_has_a_covariance_of_zero():
    arguments = moments() | {"covariances": {}}
    part = ClassStatistics.from_moments(**arguments)
    assert part.with_covariances
    assert part.covariances_by_class() == {}
    arguments["covariances"] = torch.zeros(3, FEATURES, FEATURES)
    whole = ClassStatistics.from_moments(**arguments)
    for other in (part, whole):
        other.merge(ClassStatistics.from_moments(**moments()))
    assert torch.equal(part.covariances, whole.covariances)
    assert torch.equal(part.square_deviations, whole.square_deviations)


@pytest.mark.parametrize(
    ("covariances", "message"),
    [
        ({3: torch.zeros(3, 3)}, r"covariances must be of classes in 0\.\.2, got class 3"),
        ({-1: torch.zeros(3, 3)}, r"covariances must be of classes in 0\.\.2, got class -1"),
        ({0: torch.zeros(3, 2)}, r"the covariance of class 0 must be floating point of shape \(3, 3\), got .*\(3, 2\)"),
        ({0: torch.zeros(3, 3).long()}, "the covariance of class 0 must be floating point"),
        ({0: torch.full((3, 3), float("nan"))}, "class 0 .* must be finite"),
        ({0: torch.tensor([[1.0, 2, 0], [0, 1, 0], [0, 0, 1]])}, "an asymmetry of 2 and"),
        ({0: torch.tensor([[1.0, 0, 0], [2, 1, 0], [0, 0, 1]])}, "an asymmetry of 2 and"),
        ({0: -torch.eye(3)}, "class 0 .* a smallest variance of -1"),
        (
            {1: torch.eye(3)},
            r"the covariance of class 1 \(1 samples\) .* fewer than two samples; got a largest entry of 1,",
        ),
    ],
)
def test_impossible_covariances_by_class_are_refused(covariances, message):
    arguments = moments() | {"covariances": covariances}
    with pytest.raises(ValueError, match=message):
        ClassStatistics.from_moments(**arguments)
