"""Probabilities of k nearest neighbors against an obvious version, and at its limits."""

import math

import pytest
import torch

from pfl_lightning.functional import neighbor_probabilities
from pfl_lightning.functional.neighbors import _nearest_places


def brute_force(features, labels, queries, classes, k, scale, squared):
    """One query and one sample at a time."""
    rows = []
    for query in queries.double():
        distances = [float(((query - f) ** 2).sum()) for f in features.double()]
        nearest = sorted(range(len(labels)), key=lambda i: (distances[i], i))[:k]
        weights = [math.exp(-(distances[i] if squared else math.sqrt(distances[i])) / scale) for i in nearest]
        row = [sum(w for w, i in zip(weights, nearest, strict=True) if int(labels[i]) == c) for c in range(classes)]
        rows.append([value / sum(weights) for value in row])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize(("k", "scale"), [(1, 1.0), (4, 0.3), (50, 2.0)])
def test_brute_force(squared, k, scale):
    generator = torch.Generator().manual_seed(0)
    features, queries = torch.randn(20, 3, generator=generator), torch.randn(7, 3, generator=generator)
    labels = torch.randint(4, (20,), generator=generator)
    got = neighbor_probabilities(features, labels, queries, 5, neighbors=k, scale=scale, squared=squared)
    expected = brute_force(features, labels, queries, 5, k, scale, squared)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


def test_all_samples_at_an_infinite_scale_give_the_frequencies_of_the_classes():
    labels = torch.tensor([0, 2, 2, 2])
    got = neighbor_probabilities(torch.randn(4, 3), labels, torch.randn(2, 3), 3, neighbors=9, scale=math.inf)
    assert torch.equal(got, torch.tensor([[0.25, 0.0, 0.75]] * 2, dtype=torch.float64))


def test_a_far_query_has_probabilities():
    features, labels = torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1])
    got = neighbor_probabilities(features, labels, torch.tensor([[1e4]]), 2, neighbors=2)
    assert got.tolist() == [[0.0, 1.0]]  # where e^-distance is 0 for both


def test_the_first_of_equally_near_samples_counts():
    features = torch.full((5, 3), 0.3)
    labels = torch.tensor([3, 1, 2, 0, 1])
    got = neighbor_probabilities(features, labels, torch.tensor([[0.1, 0.2, 0.7]]), 4, neighbors=1)
    assert int(got.argmax()) == 3


@pytest.mark.parametrize("count", [1, 3, 7, 12])
def test_the_selection_is_that_of_a_stable_sort(count):
    distances = torch.randint(4, (30, 12), generator=torch.Generator().manual_seed(1)).double()  # many ties
    distances[0, 3] = math.inf
    expected = distances.sort(dim=1, stable=True).indices[:, :count].sort(dim=1).values
    assert torch.equal(_nearest_places(distances, count), expected)


def test_features_that_are_no_numbers_give_none():
    features, labels = torch.tensor([[math.nan], [1.0]]), torch.tensor([0, 1])
    assert neighbor_probabilities(features, labels, torch.tensor([[1.0]]), 2, neighbors=1).shape == (1, 2)
