"""Test splits follow the client's own training distribution and come from the test set alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_lightning.datamodules import IID, DirichletOverClients, DominantClasses, PartitionError, class_counts

fast = settings(max_examples=40, deadline=None, derandomize=True)


def shuffled_labels(num_classes: int, each: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(num_classes), each))


@fast
@given(
    num_clients=st.integers(1, 12),
    alpha=st.sampled_from([0.01, 0.3, 10.0]),
    each=st.integers(1, 60),
    wanted=st.sampled_from([None, 5, 40]),
    seed=st.integers(0, 50),
)
def test_test_splits_follow_the_training_distribution(num_clients, alpha, each, wanted, seed):
    labels, test_labels = shuffled_labels(6, 100), shuffled_labels(6, each)
    rule = DirichletOverClients(num_clients, alpha, seed=seed)
    parts = rule.partition(labels)
    trained = class_counts(labels, parts, 6)
    tests = rule.partition_test(test_labels, [labels[part] for part in parts], wanted)
    drawn = class_counts(test_labels, tests, 6)
    for part, own, row, train in zip(tests, parts, drawn, trained, strict=True):
        assert len(np.unique(part)) == len(part)
        assert part.min() >= 0
        assert part.max() < len(test_labels)
        assert 1 <= len(part) <= min(len(own), wanted or len(own))
        assert (row[train == 0] == 0).all()
        held = int((train > 0).sum())
        if len(part) >= held:
            assert (row[train > 0] > 0).all()
        # Largest remainders keep within one of the share; each class raised to one sample takes one from another.
        assert np.abs(row - len(part) * train / train.sum()).max() <= 1 + held


def test_proportions_shrink_together_when_a_class_is_short():
    rule = IID(1)
    train_labels = np.repeat([0, 1], [90, 10])
    test_labels = np.repeat([0, 1], [45, 500])
    (part,) = rule.partition_test(test_labels, [train_labels])
    assert class_counts(test_labels, [part], 2).tolist() == [[45, 5]]


def test_each_client_draws_by_itself_and_clients_may_overlap():
    labels, test_labels = shuffled_labels(10, 500), shuffled_labels(10, 100)
    rule = DominantClasses(10, 200)
    train = [labels[part] for part in rule.partition(labels)]
    tests = rule.partition_test(test_labels, train)
    first = rule.partition_test(test_labels, train[:3])
    assert all(np.array_equal(one, two) for one, two in zip(tests, first, strict=False))
    shared = np.intersect1d(tests[0], tests[1])
    assert 0 < len(shared) < len(tests[0])


def test_clients_alike_draw_differently():
    labels = shuffled_labels(4, 50)
    one, two = IID(2).partition_test(labels, [np.arange(40) % 4] * 2)
    assert not np.array_equal(one, two)


def test_a_class_that_the_test_set_lacks_is_left_out():
    (part,) = IID(1).partition_test(np.array([0, 0, 0, 0]), [np.array([0, 0, 1, 1])])
    assert len(part) == 4
    with pytest.raises(PartitionError, match=r"client 1 trains on classes \[2\], and the test set has no sample"):
        IID(2).partition_test(np.array([0, 1]), [np.array([0, 1]), np.array([2, 2])])
