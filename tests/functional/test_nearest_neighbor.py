import math

import pytest
import torch
from _helpers.kmeans_references import digit_encodings, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from pfl_lightning.functional import nearest_neighbor_accuracy, neighbors

LABELS = torch.tensor(load_digits().target)


def reference(features, labels, test_features, test_labels):
    classifier = KNeighborsClassifier(1, algorithm="brute").fit(features.double().numpy(), labels.numpy())
    return classifier.score(test_features.double().numpy(), test_labels.numpy())


@given(
    sizes=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    features=st.integers(1, 5),
    classes=st.integers(1, 4),
    offset=st.sampled_from([0.0, 1000.0]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_is_exactly_that_of_scikit_learn(sizes, features, classes, offset, seed):
    values, labels = draw(sum(sizes), features, seed) + offset, torch.arange(sum(sizes)) % classes
    train, test = slice(0, sizes[0]), slice(sizes[0], None)
    arguments = values[train], labels[train], values[test], labels[test]
    assert nearest_neighbor_accuracy(*arguments).item() == reference(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_real_encodings(dtype):
    values = digit_encodings().to(dtype)
    arguments = values[:900], LABELS[:900], values[900:], LABELS[900:]
    with torch.autocast("cpu", torch.bfloat16):
        found = nearest_neighbor_accuracy(*arguments)
    assert found.dtype == torch.float64
    if dtype == torch.bfloat16:  # so coarse that many are equally near, of which scikit-learn takes any
        assert found.item() == pytest.approx(reference(*arguments), abs=0.01)
    else:
        assert found.item() == reference(*arguments)
    assert 0.5 < found.item() < 1.0


def test_blocks_do_not_matter(monkeypatch):
    values = digit_encodings()
    arguments = values[:300], LABELS[:300], values[300:500], LABELS[300:500]
    expected = nearest_neighbor_accuracy(*arguments)
    monkeypatch.setattr(neighbors, "BLOCK_ELEMENTS", 7 * 300)
    assert torch.equal(nearest_neighbor_accuracy(*arguments), expected)
    monkeypatch.setattr(neighbors, "BLOCK_ELEMENTS", 1)
    assert torch.equal(nearest_neighbor_accuracy(*arguments), expected)


@pytest.mark.parametrize("copies", [2, 7, 33])
def test_of_equally_near_ones_the_first_counts(copies):
    """Equal rows give equal results in any place of the product, which may round each differently."""
    values = draw(40, 100)
    train = values.repeat(copies, 1)
    labels = torch.arange(len(train))  # a class of its own for each: only the first copy is right
    assert nearest_neighbor_accuracy(train, labels, values, torch.arange(40)).item() == 1.0


def test_distance_is_euclidean():
    train = torch.tensor([[10.0, 0.0], [0.0, 1.0]])
    test = torch.tensor([[2.0, 0.5]])  # of the direction of the first, but close to the second
    labels = torch.tensor([0, 1])
    assert nearest_neighbor_accuracy(train, labels, test, torch.tensor([1])).item() == 1.0
    unit = [torch.nn.functional.normalize(part) for part in (train, test)]
    assert nearest_neighbor_accuracy(unit[0], labels, unit[1], torch.tensor([0])).item() == 1.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_tells_nothing(wrong):
    values, labels = draw(12, 3), torch.zeros(12, dtype=torch.long)
    broken = values.clone()
    broken[4, 1] = wrong
    assert nearest_neighbor_accuracy(values, labels, broken, labels).item() == 11 / 12
    classes = torch.arange(12)
    near = values.clone()
    near[:, :] = values[4]
    without = [index for index in range(12) if index != 4]
    expected = nearest_neighbor_accuracy(values[without], classes[without], near, classes)
    assert torch.equal(nearest_neighbor_accuracy(broken, classes, near, classes), expected)
    assert nearest_neighbor_accuracy(torch.full((3, 3), wrong), labels[:3], values, labels).item() == 0.0


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (2, torch.zeros(5, 4), "^test_features must be"),
        (0, torch.zeros(4), "^features must be"),
        (2, torch.zeros(5, 3, dtype=torch.long), "^test_features must be floating point"),
        (2, torch.zeros(5, 2), r"^test_features must be .* of shape \(M, 3\), got .*\(5, 2\)"),
        (1, torch.zeros(5, dtype=torch.long), r"^labels must be integers of shape \(4,\)"),
        (3, torch.zeros(5), "^test_labels must be integers .* got torch.float32"),
    ],
)
def test_rejects_bad_input(position, value, message):
    arguments = [
        torch.zeros(4, 3),
        torch.zeros(4, dtype=torch.long),
        torch.zeros(5, 3),
        torch.zeros(5, dtype=torch.long),
    ]
    arguments[position] = value
    with pytest.raises(ValueError, match=message):
        nearest_neighbor_accuracy(*arguments)


def test_needs_samples():
    none, labels = torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)
    with pytest.raises(ValueError, match="must be samples, got 0 to compare with and 5 to test"):
        nearest_neighbor_accuracy(none, labels, torch.zeros(5, 3), torch.zeros(5, dtype=torch.long))
