"""A million clients: the division of many is that of each alone, and nothing in it is done client by client."""

import sys
import tracemalloc

import numpy as np
import pytest
import torch

from pfl_lightning.datamodules import (
    IID,
    ClassesPerClient,
    ConceptShift,
    DirichletOverClasses,
    DirichletOverClients,
    DominantClasses,
    FederatedDataModule,
    Partitioner,
    PartitionError,
    Quantity,
    Samples,
)
from pfl_lightning.datamodules.counting import apportion
from pfl_lightning.datamodules.partition.base import matching_counts
from pfl_lightning.seeding import DataStream

CLASSES = 5


class Numbered(FederatedDataModule):
    """Inputs that say which sample they are."""

    def __init__(self, partition, size, tested, **kwargs):
        super().__init__(partition, **kwargs)
        self.size, self.tested = size, tested

    def load(self):
        def numbered(size):
            return torch.arange(size, dtype=torch.float32)[:, None], torch.arange(size) * 7 % 11 % CLASSES

        names = tuple(map(str, range(CLASSES)))
        return Samples(*numbered(self.size), names, *(numbered(self.tested) if self.tested else ()))


def ready(*args, **kwargs):
    data = Numbered(*args, **kwargs)
    data.setup()
    return data


def one_by_one(rule: Partitioner, labels, test_labels, share, seed):
    """Training, validation and test samples of each client, by loops over clients and generators of NumPy."""
    for client, part in enumerate(rule.partition(labels)):
        held = np.bincount(labels[part], minlength=CLASSES)[None]
        rng = np.random.default_rng([rule.seed, DataStream.TEST, client])
        drawn = [
            rng.choice(np.flatnonzero(test_labels == c), number, replace=False, shuffle=False)
            for c, number in enumerate(matching_counts(held, np.bincount(test_labels), None)[0])
            if number
        ]
        rounded = np.floor(held.sum(axis=1) * share + 0.5).astype(int)
        number = apportion(held * share, rounded, 0 * held, np.maximum(held - 1, 0))[0]
        order = part[np.random.default_rng([seed, DataStream.VALIDATION, client]).permutation(len(part))]
        chosen = np.concatenate([order[labels[order] == c][: number[c]] for c in range(CLASSES)])
        yield np.setdiff1d(part, chosen), np.sort(chosen), np.sort(np.concatenate(drawn))


@pytest.mark.filterwarnings("ignore:.* leaves .* training items")
@pytest.mark.parametrize("clients", [4, 300])
@pytest.mark.parametrize(
    "rule",
    [IID, DominantClasses, ClassesPerClient, DirichletOverClasses, DirichletOverClients],
    ids=lambda r: r.__name__,
)
def test_the_division_is_that_of_each_client_alone(rule, clients):
    options = {"min_samples": 4} if rule is DirichletOverClients else {}
    data = ready(rule(clients, seed=3, **options), 6000, 900, validation_share=0.2, seed=8)
    samples = data.load()
    labels, test_labels = samples.train_targets.numpy(), samples.test_targets.numpy()
    expected = one_by_one(data.partition, labels, test_labels, 0.2, 8)
    for client, splits in enumerate(expected):
        own = data.client_data(client)
        for found, wanted in zip((own.train, own.validation, own.test), splits, strict=True):
            assert found.indices.tolist() == wanted.tolist()


def test_classes_per_client_are_those_of_one_client_after_another():
    for clients, classes in ((3, 2), (23, 2), (24, 3), (30, [1, 2, 4])):
        rule = ClassesPerClient(clients, classes, seed=5)
        rng, number = np.random.default_rng(1), rule._num_held
        held, holders = np.zeros((clients, CLASSES), dtype=bool), np.zeros(CLASSES)
        for client in rng.permutation(clients):
            chosen = np.argsort(holders + rng.random(CLASSES) * 0.5)[: number[client]]
            held[client, chosen], holders[chosen] = True, holders[chosen] + 1
        again = np.random.default_rng(1)
        assert np.array_equal(rule._assign_classes(CLASSES, again), held)
        assert again.random() == rng.random()


def test_the_minimum_is_raised_from_the_largest_client_first():
    rng = np.random.default_rng(2)
    counts, shares = rng.poisson(0.7, (80, CLASSES)) * rng.integers(1, 20, (80, 1)), rng.random((80, CLASSES))
    expected = counts.copy()
    for client in np.flatnonzero(expected.sum(axis=1) < 5):
        while (missing := 5 - expected[client].sum()) > 0:
            sizes = expected.sum(axis=1)
            donor = int(sizes.argmax())
            favored = int(np.where(expected[donor] > 0, shares[client], -1.0).argmax())
            moved = min(missing, expected[donor, favored], sizes[donor] - 5)
            expected[donor, favored] -= moved
            expected[client, favored] += moved
    found = DirichletOverClients(80, min_samples=5)._raise_to_minimum(counts, shares)
    assert np.array_equal(found, expected)


RULES = [
    IID,
    DominantClasses,
    ClassesPerClient,
    DirichletOverClasses,
    lambda clients: Quantity(IID(clients), (3, 4)),
]


@pytest.mark.filterwarnings("ignore:.* leaves .* training items")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tested", [0, 100_000])
def test_nothing_is_done_client_by_client(rule, tested):
    """Calls are counted, those of NumPy and torch included: a loop over 20,000 clients has as many or more."""
    clients, calls = 20_000, 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    data = Numbered(rule(clients), 200_000, tested, test_share=0.1)
    sys.setprofile(count)
    try:
        data.setup()
        assert data.fingerprint
        assert data.data_fingerprint
        assert data.class_counts().sum() > clients
        assert data.client_groups is None
    finally:
        sys.setprofile(None)
    assert calls < clients


def test_index_lists_are_all_that_a_client_takes():
    clients, each = 20_000, 10
    tracemalloc.start()
    try:
        data = Numbered(IID(clients), clients * each, 5000)
        before = tracemalloc.get_traced_memory()[0]
        data.setup()
        found = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    indices, bounds = 8 * 2 * each, 4 * 16  # tested on as many as it has; four splits, their sizes and their ends
    assert found < clients * (indices + bounds + 50)


def test_other_views_of_some_clients_are_kept():
    data = ready(ConceptShift(IID(4), groups=[0, 0, 1, 1]), 400, 100)
    assert [view.is_identity for view in data._loaded.views] == [True, True, False, False]
    plain = ready(IID(4), 400, 100)
    assert plain._loaded.views == ()
    assert plain.client_data(3).train.view is None


@pytest.mark.parametrize("rule", [IID, DominantClasses, ClassesPerClient, DirichletOverClasses, DirichletOverClients])
def test_more_clients_than_samples_are_refused(rule):
    with pytest.raises(PartitionError, match=r"lower .*num_clients"):
        ready(rule(1000), 300, 50)
