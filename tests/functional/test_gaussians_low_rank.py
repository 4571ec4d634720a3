"""Covariances of few samples of many features, which are decomposed within their range."""

import pytest
import torch

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


def accumulate(values, labels, classes):
    statistics = ClassStatistics(classes, values.shape[1])
    statistics.update(values, labels)
    return statistics


def decomposed(monkeypatch):
    """The sizes of the matrices that are decomposed."""
    sizes, original = [], torch.linalg.eigh

    def watch(matrix):
        sizes.append(len(matrix))
        return original(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", watch)
    return sizes


def low_rank(sizes, features=120, spread=0.0, seed=0):
    """Statistics of classes of few samples, the samples' axes of deviations between 1 and 10^-spread."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    scales = torch.logspace(0, -spread, features, dtype=torch.float64)[torch.randperm(features, generator=generator)]
    values = torch.randn(len(labels), features, generator=generator, dtype=torch.float64) * scales
    return accumulate(values, labels, len(sizes)), values, labels


@pytest.mark.parametrize("spread", [0.0, 3.0, 6.0])
def test_few_samples_of_many_features_are_decomposed_in_their_range(monkeypatch, spread):
    statistics, values, labels = low_rank([2, 9, 30, 31, 119, 121], spread=spread)
    sizes = decomposed(monkeypatch)
    factors, ranks = covariance_factors(statistics)
    assert sizes == [11, 18, 39, 40, 120, 120]  # samples - 1 + 10 columns, until a third of the features
    assert ranks.tolist()[:4] == [1, 8, 29, 30]
    restored = covariances_from(factors, ranks, 120)
    torch.testing.assert_close(restored, statistics.covariances, rtol=0, atol=1e-13)
    for y, factor in enumerate(factors.split(ranks.tolist())[:4]):
        rows = values[labels == y]
        spectrum = torch.linalg.svdvals(rows - rows.mean(0)) / (len(rows) - 1) ** 0.5
        torch.testing.assert_close(factor.norm(dim=1), spectrum[:-1], rtol=0, atol=1e-9)


def test_a_rank_below_the_number_of_samples_is_found_in_the_range(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    values, mixing = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((40, 4), (4, 100)))
    statistics = accumulate(values @ mixing, torch.arange(40) % 2, 2)
    sizes = decomposed(monkeypatch)
    factors, ranks = covariance_factors(statistics)
    assert sizes == [29, 29]
    assert ranks.tolist() == [4, 4]
    torch.testing.assert_close(covariances_from(factors, ranks, 100), statistics.covariances, rtol=0, atol=1e-9)
    same = accumulate(torch.ones(12, 100), torch.zeros(12, dtype=torch.long), 1)
    assert covariance_factors(same)[1].tolist() == [0]


@pytest.mark.parametrize("sizes", [[2, 9, 30], [300, 8, 200]])
def test_samples_of_a_low_rank_are_those_of_the_symmetric_root(sizes):
    """The root by a singular value decomposition of the samples themselves."""
    statistics, values, labels = low_rank(sizes)
    total = 50
    features, drawn = sample_class_gaussians(statistics, total, torch.Generator().manual_seed(7))
    noise = torch.randn(total, 120, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for y, size in enumerate(sizes):
        rows = values[labels == y]
        _, deviations, axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
        keep = min(size - 1, 120)
        root = axes[:keep].T * (deviations[:keep] / (size - 1) ** 0.5) @ axes[:keep]
        expected = rows.mean(0) + noise[drawn == y] @ root
        torch.testing.assert_close(features[drawn == y], expected, rtol=0, atol=1e-9)
