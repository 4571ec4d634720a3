import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pfl_lightning.functional import (
    ClassStatistics,
    covariance_factors,
    sample_class_gaussians,
)
from pfl_lightning.functional.gaussians import covariances_by_class


def covariances_from(factors, ranks, features):
    """Of all classes, zero without rows."""
    found = torch.zeros(len(ranks), features, features, dtype=torch.float64)
    for y, covariance in covariances_by_class(factors, ranks, features).items():
        found[y] = covariance
    return found


def accumulate(values, labels, classes, **options):
    statistics = ClassStatistics(classes, values.shape[1], **options)
    statistics.update(values, labels)
    return statistics


def draw(sizes, features, seed=0, rank=None):
    """Statistics of `sizes[y]` correlated features of each class y, in a subspace of `rank` dimensions."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    rank = features if rank is None else rank
    mixing = torch.randn(len(sizes), rank, features, generator=generator, dtype=torch.float64)
    values = torch.randn(len(labels), 1, rank, generator=generator, dtype=torch.float64) @ mixing[labels]
    offsets = 3 * torch.randn(len(sizes), features, generator=generator, dtype=torch.float64)
    return accumulate(values.squeeze(1) + offsets[labels], labels, len(sizes))


def of_counts(counts):
    """Statistics of one feature that say nothing but how often each class came."""
    counts = torch.tensor(counts)
    return ClassStatistics.from_moments(counts, torch.zeros(len(counts), 1), torch.zeros(len(counts), 1, 1))


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5), features=st.integers(1, 6), seed=st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_factors_give_the_covariances_back(sizes, features, seed):
    statistics = draw(sizes, features, seed)
    factors, ranks = covariance_factors(statistics)
    assert factors.dtype == torch.float64
    assert ranks.dtype == torch.int64
    assert factors.shape == (int(ranks.sum()), features)
    assert all(rank <= max(0, min(size - 1, features)) for rank, size in zip(ranks.tolist(), sizes, strict=True))
    restored = covariances_from(factors, ranks, features)
    torch.testing.assert_close(restored, statistics.covariances, rtol=0, atol=1e-9)
    single = covariances_from(factors.float(), ranks, features)
    scale = statistics.covariances.abs().max().item()
    torch.testing.assert_close(single, statistics.covariances, rtol=0, atol=1e-6 * scale)
    assert torch.equal(single, single.mT)


def test_a_factor_has_no_more_rows_than_directions():
    statistics = draw([40, 5, 1, 0], features=12, rank=7)
    factors, ranks = covariance_factors(statistics)
    assert ranks.tolist() == [7, 4, 0, 0]  # seven dimensions; five samples; one sample; none
    torch.testing.assert_close(covariances_from(factors, ranks, 12), statistics.covariances, rtol=0, atol=1e-9)
    lengths = factors[:7].square().sum(dim=1)
    assert torch.equal(lengths, lengths.sort(descending=True).values)


def test_repeated_samples_have_no_factor():
    statistics = accumulate(torch.ones(6, 3), torch.tensor([0, 0, 0, 2, 2, 2]), 3)
    factors, ranks = covariance_factors(statistics)
    assert factors.shape == (0, 3)
    assert ranks.tolist() == [0, 0, 0]
    assert not covariances_from(factors, ranks, 3).any()


def test_server_restores_and_pools_what_clients_send():
    clients = [draw([30, 4, 0, 1], 6, seed=1), draw([2, 1, 0, 1], 6, seed=2)]
    pooled = ClassStatistics(4, 6)
    for client in clients:
        factors, ranks = covariance_factors(client)
        covariances = covariances_from(factors, ranks, 6)
        pooled.merge(ClassStatistics.from_moments(client.counts, client.means, covariances))
    expected = ClassStatistics(4, 6).merge(*clients)
    torch.testing.assert_close(pooled.covariances, expected.covariances, rtol=0, atol=1e-9)


def test_covariances_by_class_are_those_that_are_not_zero():
    factors, ranks = covariance_factors(draw([5, 1, 0, 9], features=6))
    dense, by_class = covariances_from(factors, ranks, 6), covariances_by_class(factors, ranks, 6)
    assert list(by_class) == [0, 3]
    for y, covariance in by_class.items():
        assert torch.equal(covariance, dense[y])
    assert not dense[1:3].any()
    with pytest.raises(ValueError, match="add up to the 10 rows of factors, got 9"):
        covariances_by_class(factors, torch.tensor([4, 0, 0, 5]), 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factors": torch.zeros(3, 4)}, r"factors must be floating point of shape \(R, 2\)"),
        ({"factors": torch.zeros(3, 2, dtype=torch.long)}, "factors must be floating point"),
        ({"ranks": torch.tensor([2.0, 1.0])}, r"ranks must be integers of shape \(C,\)"),
        ({"ranks": torch.tensor([[2, 1]])}, "ranks must be integers"),
        ({"ranks": torch.tensor([4, -1])}, r"ranks must lie in 0\.\.2, got 4 for class 0"),
        ({"ranks": torch.tensor([2, -1])}, r"ranks must lie in 0\.\.2, got -1 for class 1"),
        ({"ranks": torch.tensor([2, 2])}, "add up to the 3 rows of factors, got 4"),
        ({"factors": torch.full((3, 2), float("nan"))}, "factors must be finite, got 6 non-finite values of 6"),
    ],
)
def test_bad_factors_are_refused(change, message):
    arguments = {"factors": torch.ones(3, 2), "ranks": torch.tensor([2, 1]), "num_features": 2} | change
    with pytest.raises(ValueError, match=message):
        covariances_by_class(**arguments)


def assert_moments_converge(rows, mean, covariance):
    """Within six standard errors of a Gaussian's sample mean and sample covariance, entry by entry."""
    count, variances = len(rows), covariance.diagonal()
    slack = 1e-9  # where a standard error is zero
    assert ((rows.mean(0) - mean).abs() <= 6 * (variances / count).sqrt() + slack).all()
    error = ((variances[:, None] * variances[None, :] + covariance.square()) / (count - 1)).sqrt()
    assert ((rows.T.cov() - covariance).abs() <= 6 * error + slack).all()


@pytest.mark.parametrize("sizes", [[300, 200], [5, 3]], ids=["full rank", "rank deficient"])
def test_samples_have_the_given_moments(sizes):
    statistics = draw(sizes, features=6)
    features, labels = sample_class_gaussians(statistics, 40_000, torch.Generator().manual_seed(0))
    assert features.dtype == torch.float64
    for y in range(2):
        assert_moments_converge(features[labels == y], statistics.means[y], statistics.covariances[y])


def test_samples_of_a_singular_covariance_lie_in_its_subspace():
    statistics = draw([4], features=8)
    features, _ = sample_class_gaussians(statistics, 500, torch.Generator().manual_seed(0))
    values, vectors = torch.linalg.eigh(statistics.covariances[0])
    assert (values > 1e-9).sum() == 3
    away = (features - statistics.means[0]) @ vectors[:, :5]
    assert away.abs().max() < 1e-12


def test_classes_without_covariance_give_their_mean():
    values = torch.tensor([[1.5, -2.0, 0.1]] * 5 + [[7.0, 0.3, 0.0]])
    statistics = accumulate(values, torch.tensor([0] * 5 + [2]), 3)
    features, labels = sample_class_gaussians(statistics, 12, torch.Generator().manual_seed(0))
    assert labels.tolist() == [0] * 10 + [2] * 2
    assert torch.equal(features, statistics.means[labels])


def test_the_generator_alone_decides():
    statistics = draw([30, 3, 0, 1], features=5)
    first = sample_class_gaussians(statistics, 50, torch.Generator().manual_seed(3))
    torch.manual_seed(1)
    again = sample_class_gaussians(statistics, 50, torch.Generator().manual_seed(3))
    other = sample_class_gaussians(statistics, 50, torch.Generator().manual_seed(4))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], other[1])
    assert not torch.equal(first[0], other[0])


def test_rounding_changes_the_samples_as_little():
    # Eigenvectors may change their signs, and those of equal eigenvalues turn, at the last digit.
    parts = [draw([40, 40], features=5, seed=seed) for seed in range(3)]
    forth, back = ClassStatistics(2, 5).merge(*parts), ClassStatistics(2, 5).merge(*reversed(parts))
    assert not torch.equal(forth.covariances, back.covariances)
    first, second = (sample_class_gaussians(s, 60, torch.Generator().manual_seed(0))[0] for s in (forth, back))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-10)


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), extra=st.integers(0, 200))
@example(counts=[1, 1, 1000, 0], extra=0)
@example(counts=[1, 10, 1000], extra=7)
@settings(max_examples=150, deadline=None)
def test_total_is_divided_in_proportion(counts, extra):
    seen, samples = sum(count > 0 for count in counts), sum(counts)
    total = seen + extra
    _, labels = sample_class_gaussians(of_counts(counts), total, torch.Generator())
    shares = torch.bincount(labels, minlength=len(counts)).tolist()
    assert torch.equal(labels, labels.sort().values)
    assert sum(shares) == total
    for share, count in zip(shares, counts, strict=True):
        assert (share > 0) == (count > 0)
    for share, count in zip(shares, counts, strict=True):
        for other_share, other_count in zip(shares, counts, strict=True):
            assert share >= other_share or count <= other_count
    parts = [total * count / samples for count in counts]
    if all(part >= 1 for part in parts if part > 0):  # no class is raised to one: within one of the exact part
        assert all(abs(share - part) < 1 for share, part in zip(shares, parts, strict=True))


@pytest.mark.parametrize(
    ("counts", "total", "expected"),
    [
        ([10, 20, 30], 6, [1, 2, 3]),
        ([1, 1, 1], 5, [2, 2, 1]),  # ties go to the lower class
        ([6, 3, 1], 5, [3, 1, 1]),  # 3, 1.5, 0.5: class 2 gets one, and the other four go 2.67 to 1.33
        ([0, 1, 999], 10, [0, 1, 9]),
        ([50, 50, 1, 1, 1], 5, [1, 1, 1, 1, 1]),
        ([7, 0], 1, [1, 0]),
    ],
)
def test_largest_remainders(counts, total, expected):
    _, labels = sample_class_gaussians(of_counts(counts), total, torch.Generator())
    assert torch.bincount(labels, minlength=len(counts)).tolist() == expected


def test_sampling_rejects_bad_input():
    with pytest.raises(ValueError, match="each of 3 classes seen, got 2"):
        sample_class_gaussians(of_counts([4, 1, 0, 9]), 2, torch.Generator())
    with pytest.raises(ValueError, match="at least one sample"):
        sample_class_gaussians(ClassStatistics(2, 3), 10, torch.Generator())
    lean = accumulate(torch.ones(2, 3), torch.tensor([0, 1]), 2, with_covariances=False)
    with pytest.raises(RuntimeError, match="with_covariances=True"):
        sample_class_gaussians(lean, 10, torch.Generator())
    with pytest.raises(RuntimeError, match="with_covariances=True"):
        covariance_factors(lean)
