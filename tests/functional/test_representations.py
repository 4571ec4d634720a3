"""Class separation and centered kernel alignment against their definitions, written out in loops."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pfl_lightning.functional import class_separation, linear_cka, pairwise_linear_cka


def separation_by_pairs(features, labels):
    """Every pair by itself."""

    def distance(x, y):
        return 1 - float(x @ y) / float(np.linalg.norm(x) * np.linalg.norm(y))

    def mean_distance(rows, others):
        return np.mean([distance(x, y) for x, y in itertools.product(rows, others)])

    held = [features[labels == c] for c in np.unique(labels)]
    within = np.mean([mean_distance(rows, rows) for rows in held])
    total = np.mean([mean_distance(rows, others) for rows, others in itertools.product(held, held)])
    return 1 - within / total


@pytest.mark.parametrize("seed", range(4))
def test_class_separation_is_that_of_all_pairs(seed):
    rng = np.random.default_rng(seed)
    labels = np.array([0] * 3 + [2] * 7 + [5] * 2)
    features = rng.normal(size=(12, 4)) + 2 * rng.normal(size=(6, 4))[labels]
    got = class_separation(torch.from_numpy(features), torch.from_numpy(labels))
    assert got == pytest.approx(separation_by_pairs(features, labels), abs=1e-12)


def test_class_separation_at_its_ends():
    axes = torch.eye(3).repeat_interleave(4, dim=0) * torch.arange(1, 13)[:, None]  # lengths do not count
    labels = torch.arange(3).repeat_interleave(4)
    assert class_separation(axes, labels) == pytest.approx(1)
    mixed = torch.eye(3).repeat(4, 1)
    assert class_separation(mixed, torch.arange(4).repeat_interleave(3)) == pytest.approx(0)


def test_class_separation_has_no_value_without_two_classes_or_two_directions():
    assert np.isnan(class_separation(torch.randn(4, 3), torch.ones(4)))
    assert np.isnan(class_separation(torch.ones(4, 3), torch.tensor([0, 0, 1, 1])))


def cka_by_samples(x, y):
    """The Hilbert-Schmidt form: tr(K H L H) with linear kernels."""
    n = len(x)
    center = np.eye(n) - np.ones((n, n)) / n

    def hsic(first, second):
        return np.trace(first @ center @ second @ center)

    one, other = x @ x.T, y @ y.T
    return hsic(one, other) / np.sqrt(hsic(one, one) * hsic(other, other))


def test_linear_cka_is_the_ratio_of_hilbert_schmidt_criteria():
    rng = np.random.default_rng(0)
    several = [rng.normal(size=(15, width)) + 3 for width in (4, 7, 4)]
    several[2] = several[0] @ rng.normal(size=(4, 4)) + several[2]
    got = pairwise_linear_cka([torch.from_numpy(one) for one in several])
    expected = [[cka_by_samples(x, y) for y in several] for x in several]
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)
    both = linear_cka(torch.from_numpy(several[0]), torch.from_numpy(several[1]))
    assert both == pytest.approx(expected[0][1], abs=1e-12)


def test_linear_cka_ignores_rotation_shift_and_scale_but_not_other_maps():
    torch.manual_seed(0)
    x = torch.randn(30, 5, dtype=torch.float64)
    turn, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    assert linear_cka(x, -3 * x @ turn + 7) == pytest.approx(1)
    assert linear_cka(x, F.pad(x[:, :1], (0, 4))) < 0.9


def test_a_representation_that_is_the_same_for_all_samples_has_no_alignment():
    got = pairwise_linear_cka([torch.full((6, 3), 0.1), torch.randn(6, 3)])
    assert got.isnan().tolist() == [[True, True], [True, False]]


def test_shapes_must_fit():
    with pytest.raises(ValueError, match=r"features must be .* shape \(3, width\), got .*\(4, 2\)"):
        class_separation(torch.randn(4, 2), torch.zeros(3))
    with pytest.raises(ValueError, match=r"shape \(4, width\), got .*\(5, 2\)"):
        pairwise_linear_cka([torch.randn(4, 2), torch.randn(5, 2)])
    with pytest.raises(ValueError, match="no representation"):
        pairwise_linear_cka([])
