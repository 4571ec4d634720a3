"""Properties that hold for every partition rule, whatever the labels, arguments and seed."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_lightning.datamodules import (
    IID,
    ClassesPerClient,
    DirichletOverClasses,
    DirichletOverClients,
    DominantClasses,
    Partitioner,
    PartitionError,
    Quantity,
    class_counts,
    dominant_groups,
)
from pfl_lightning.datamodules.partition.base import check_parts

fast = settings(max_examples=40, deadline=None, derandomize=True)
RULES: dict[str, Callable[..., Partitioner]] = {
    "iid": IID,
    "dominant": DominantClasses,
    "dirichlet_clients": lambda *args, **kwargs: DirichletOverClients(*args, min_samples=1, **kwargs),
    "dirichlet_classes": DirichletOverClasses,
    "classes": ClassesPerClient,
    "quantity": lambda num_clients, seed: Quantity(IID(num_clients, seed=seed), (5, 10), seed),
}


def shuffled_labels(num_classes: int, each: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(num_classes), each))


@pytest.mark.parametrize("name", RULES)
@fast
@given(num_clients=st.integers(1, 12), num_classes=st.integers(2, 12), seed=st.integers(0, 2**40))
def test_parts_are_disjoint_in_range_and_determined_by_the_seed(name, num_clients, num_classes, seed):
    labels = shuffled_labels(num_classes, 150, seed % 7)
    parts = RULES[name](num_clients, seed=seed).partition(labels)
    again = RULES[name](num_clients, seed=seed).partition(labels.copy())
    assert len(parts) == num_clients
    everything = np.concatenate(parts)
    assert everything.dtype == np.int64
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0
    assert everything.max() < len(labels)
    assert all(len(part) > 0 for part in parts)
    assert all(np.array_equal(one, two) for one, two in zip(parts, again, strict=True))


@pytest.mark.parametrize("name", RULES)
def test_another_seed_gives_other_parts(name):
    labels = shuffled_labels(10, 100)
    one, two = (RULES[name](8, seed=seed).partition(labels) for seed in (0, 1))
    assert not np.array_equal(np.concatenate(one), np.concatenate(two))


@pytest.mark.parametrize("rule", [IID, DominantClasses, DirichletOverClasses, DirichletOverClients, ClassesPerClient])
@pytest.mark.parametrize("sizes", [30, [10, 20, 30, 40, 50, 60]])
def test_sizes_asked_for_are_met_exactly(rule, sizes):
    parts = rule(6, samples_per_client=sizes, seed=3).partition(shuffled_labels(10, 100))
    assert [len(part) for part in parts] == ([30] * 6 if sizes == 30 else sizes)


@fast
@given(num_clients=st.integers(1, 30), share=st.floats(0, 1), size=st.integers(1, 60))
def test_dominant_classes_hold_their_share_within_one_sample(num_clients, share, size):
    labels = shuffled_labels(10, 2000)
    parts = DominantClasses(num_clients, size, uniform_share=share).partition(labels)
    counts = class_counts(labels, parts, 10)
    groups = [{0, 1, 2}, {2, 3, 4}, {4, 5, 6}, {6, 7, 8}, {8, 9, 0}]
    for client, row in enumerate(counts):
        dominant = groups[client * 5 // num_clients]
        expected = [size * (share / 10 + (1 - share) / 3 * (c in dominant)) for c in range(10)]
        assert np.abs(row - expected).max() < 1 + 1e-6


def test_dominant_classes_without_a_size_use_as_much_as_the_scarcest_class_allows():
    labels = shuffled_labels(10, 5000)
    parts = DominantClasses(20).partition(labels)
    size = len(parts[0])
    assert {len(part) for part in parts} == {size}
    assert size > 1700  # 8 of 20 clients are after class 0: 5000 / (20 * 0.02 + 8 * 0.8 / 3) = 1973
    with pytest.raises(PartitionError):
        DominantClasses(20, size + 20).partition(labels)


def test_samples_of_a_class_are_assigned_at_random():
    labels = np.repeat(np.arange(4), 100)
    one, two = (DominantClasses(2, 40, 0.0, [[0], [1]], seed=seed).partition(labels) for seed in (0, 1))
    for first, second in zip(one, two, strict=True):
        assert not np.array_equal(first, second)
        assert np.diff(first).max() > 1  # not simply the first ones of the class


def test_dominant_groups():
    assert dominant_groups(10) == [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [8, 9, 0]]
    assert [len(group) for group in dominant_groups(62)] == [10, 26, 26]
    assert dominant_groups(5) == [[0, 1, 2], [2, 3, 4], [4, 0, 1]]
    labels = shuffled_labels(4, 100)
    counts = class_counts(labels, DominantClasses(2, 10, 0.0, [[0], [3]]).partition(labels), 4)
    assert counts.tolist() == [[10, 0, 0, 0], [0, 0, 0, 10]]


def test_overlap_lets_clients_share_samples_and_no_client_has_one_twice():
    labels = shuffled_labels(10, 50)
    with pytest.raises(PartitionError, match=r"class \d has 50 samples, \d+ needed"):
        DominantClasses(20, 60).partition(labels)
    parts = DominantClasses(20, 60, overlap=True).partition(labels)
    assert all(len(np.unique(part)) == 60 for part in parts)
    assert len(np.unique(np.concatenate(parts))) > 450


def test_the_greatest_size_with_overlap_is_one_that_a_client_may_have():
    labels = np.repeat(np.arange(10), 100)
    size = len(DominantClasses(20, None, overlap=True).partition(labels)[0])
    assert size > 2 * len(DominantClasses(20, None).partition(labels)[0])
    with pytest.raises(PartitionError, match=f"lower samples_per_client to at most {size},"):
        DominantClasses(20, size + 10, overlap=True).partition(labels)


@fast
@given(
    num_clients=st.integers(1, 25),
    per_group=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_every_client_holds_its_number_of_classes_and_holders_are_balanced(num_clients, per_group, seed):
    labels = shuffled_labels(9, 400)
    classes = per_group[0] if len(per_group) == 1 else per_group
    parts = ClassesPerClient(num_clients, classes, samples_per_client=20, seed=seed).partition(labels)
    counts = class_counts(labels, parts, 9)
    wanted = [per_group[client * len(per_group) // num_clients] for client in range(num_clients)]
    assert (counts > 0).sum(axis=1).tolist() == wanted
    holders = (counts > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    for row in counts:
        assert row[row > 0].max() - row[row > 0].min() <= 1


def test_quantity_draws_sizes_on_top_of_any_rule():
    class Halves(Partitioner):
        def partition(self, labels):
            return [np.flatnonzero(labels < 5), np.flatnonzero(labels >= 5)]

    labels = shuffled_labels(10, 200)
    for base in (DominantClasses(2), ClassesPerClient(2), DirichletOverClients(2), Halves(2)):
        rule = Quantity(base, (30, 60), seed=1)
        assert [len(part) for part in rule.partition(labels)] == rule.client_sizes().tolist()
    assert (labels[Quantity(Halves(2), (30,)).partition(labels)[1]] >= 5).all()
    counts = class_counts(labels, Quantity(Halves(2), (52,)).partition(labels), 10)
    assert counts[0, :5].min() >= 10  # the thinned part keeps the class proportions
    assert set(Quantity(IID(50), (3, 4)).client_sizes().tolist()) == {3, 4}
    with pytest.raises(PartitionError, match="client 0 has 1000 samples, 2000 drawn for it"):
        Quantity(Halves(2), (2000,)).partition(labels)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (IID(4, 100), r"4 clients need 400 samples in all, the data have 200 \(200 short\).* at most 50"),
        (IID(300), r"300 clients need 300 samples in all, the data have 200 \(100 short\)"),
        (
            DominantClasses(4, 100),
            r"class \d has 20 samples, \d+ needed \(\d+ short\).*lower samples_per_client to at most",
        ),
        (
            DominantClasses(2, 10, groups=[[11]]),
            r"groups name class 11, the data have \[0, 1, 2, 3, 4, 5, 6, 7, 8, 9\]",
        ),
        (ClassesPerClient(4, 11), "client 0 should hold 11 classes, the data have 10"),
        (ClassesPerClient(4, 2, 50), r"class \d has 20 samples, 25 needed \(5 short\).*at most 4[0-9]"),
        (DirichletOverClasses(4, samples_per_client=51), r"need 204 samples in all, the data have 200 \(4 short\)"),
        (DirichletOverClients(4, min_samples=60), r"need 240 samples .* 200 \(40 short\).* at most 50"),
    ],
)
def test_a_partition_that_cannot_be_met_says_what_is_short(rule, message):
    with pytest.raises(PartitionError, match=message):
        rule.partition(shuffled_labels(10, 20))


def test_a_class_without_samples_is_named():
    with pytest.raises(PartitionError, match=r"groups name class 3, the data have \[0, 1, 2, 4\]"):
        DominantClasses(5, groups=[[0, 3]]).partition(np.array([0, 1, 2, 4] * 50))


@pytest.mark.parametrize("rule", [ClassesPerClient(3, 2), DominantClasses(3), ClassesPerClient(4, np.int64(2))])
def test_a_class_without_samples_is_nobodys(rule):
    """As if the classes had been numbered without the gap."""
    with_gap, without = np.repeat([0, 2, 3], 40), np.repeat([0, 1, 2], 40)
    assert [part.tolist() for part in rule.partition(with_gap)] == [part.tolist() for part in rule.partition(without)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IID(0), "num_clients must be at least 1, got 0"),
        (lambda: IID(2, seed=-1), "seed"),
        (lambda: ClassesPerClient(2, [2.5, 1]), "whole numbers of at least 1"),
        (lambda: DominantClasses(2, groups=[[0.5, 1]]), "lists of dominant classes, whole numbers"),
        (lambda: DominantClasses(2, groups=[[-1, 1]]).partition(np.repeat([0, 1], 9)), "groups name class -1"),
        (lambda: IID(4, 1).partition(np.zeros(3, int)), r"\(1 short\): lower num_clients \(to at most 3\)"),
        (lambda: Quantity(IID(2), sizes=[1.5, 2]), "sizes must be at least one whole number"),
        (lambda: IID(2, [1, 2, 3]).partition(np.zeros(9, int)), "or one for each of the 2 clients"),
        (lambda: IID(2, 0).partition(np.zeros(9, int)), "a whole number from 1"),
        (lambda: DominantClasses(2, uniform_share=1.5), "uniform_share must be between 0 and 1"),
        (lambda: DominantClasses(2, groups=[[]]), "groups"),
        (lambda: ClassesPerClient(2, []), "classes_per_client"),
        (lambda: DirichletOverClients(2, alpha=0), "alpha must be a finite number above 0"),
        (lambda: DirichletOverClients(2, min_samples=0), "min_samples"),
        (lambda: Quantity(IID(2), ()), "sizes"),
        (lambda: IID(2).partition(np.zeros((2, 2), int)), "instead of a list"),
        (lambda: IID(2).partition(np.zeros(4)), "whole numbers"),
        (lambda: IID(2).partition(np.array([-1, 0])), "classes from 0, one per sample"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Listed(Partitioner):
    """A rule of a user's, which gives plain lists."""

    def partition(self, labels):
        return [list(range(start, len(labels), self.num_clients)) for start in range(self.num_clients)]


def test_sizes_of_a_rule_that_gives_lists():
    parts = Quantity(Listed(4), (5, 10)).partition(np.arange(80) % 4)
    assert {len(part) for part in parts} <= {5, 10}


def test_samples_that_clients_may_share_give_no_warning(recwarn):
    rule = DominantClasses(4, 30, groups=[[0, 1]], overlap=True)
    parts = check_parts(rule, rule.partition(np.repeat([0, 1, 2], 20)), 60)
    assert len(np.unique(np.concatenate(parts))) < sum(map(len, parts))
    assert not recwarn
