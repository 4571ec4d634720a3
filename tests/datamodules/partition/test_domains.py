"""Clients by domain: exact sizes, test samples that no client trains on, and sizes that a domain cannot meet."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_lightning.datamodules import (
    Domains,
    FeatureShift,
    FederatedDataModule,
    Partitioner,
    PartitionError,
    Quantity,
    Samples,
)

fast = settings(max_examples=60, deadline=None, derandomize=True)


def bound(rule, sizes):
    """The rule on domains of these sizes, their samples shuffled, and the domain of each sample."""
    domains = np.random.default_rng(1).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return rule.with_domains(domains, [f"domain {d}" for d in range(len(sizes))]), domains


def parts_of(rule, domains, wanted=None):
    labels = np.zeros(len(domains), dtype=np.int64)
    return rule.partition(labels), rule.partition_test(labels, [], wanted)


@fast
@given(
    domains=st.lists(st.integers(10, 60), min_size=1, max_size=5),
    each=st.integers(1, 3),
    size=st.none() | st.integers(1, 30),
    wanted=st.none() | st.integers(1, 20),
    seed=st.integers(0, 9),
)
def test_every_client_holds_its_domain_and_no_test_sample_is_trained_on(domains, each, size, wanted, seed):
    num_clients = each * len(domains)
    rule, domain_of = bound(Domains(num_clients, size, seed=seed), domains)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train, test = parts_of(rule, domain_of, wanted)
        again = parts_of(rule, domain_of, wanted)
    assert all(np.array_equal(*pair) for one, two in zip((train, test), again) for pair in zip(one, two))
    everything = np.concatenate(train)
    assert len(np.unique(everything)) == len(everything)
    assert not np.intersect1d(everything, np.concatenate(test)).size
    for client, (own, tested) in enumerate(zip(train, test, strict=True)):
        domain = client // each
        most = int(np.floor(0.8 * domains[domain] + 0.5)) // each
        assert len(own) == (most if size is None else min(size, most))
        assert (np.sort(own) == own).all()
        assert (domain_of[own] == domain).all()
        assert (domain_of[tested] == domain).all()
        left = domains[domain] - sum(map(len, train[domain * each : domain * each + each]))
        assert len(np.unique(tested)) == len(tested) == (left if wanted is None else min(left, wanted))


def test_seeds_draw_differently_and_domains_do_not_disturb_each_other():
    rule, domains = bound(Domains(2, 20), [50, 50])
    other, _ = bound(Domains(2, 20, seed=1), [50, 50])
    assert not np.array_equal(parts_of(rule, domains)[0][0], parts_of(other, domains)[0][0])
    uneven, _ = bound(Domains(2, [20, 3]), [50, 50])
    assert np.array_equal(parts_of(rule, domains)[0][0], parts_of(uneven, domains)[0][0])


def test_clients_of_one_domain_share_its_tests_and_draw_their_own_choice_of_them():
    rule, domains = bound(Domains(2, 10), [60])
    one, two = parts_of(rule, domains)[1]
    assert np.array_equal(one, two)
    assert len(one) == 40
    one, two = parts_of(rule, domains, 15)[1]
    assert not np.array_equal(one, two)


def test_a_small_domain_gives_what_leaves_tests_as_in_dualfed():
    sizes = [2427, 4365, 4439, 4357]  # Office-Home: Art, Clipart, Product, Real World
    rule, domains = bound(Domains(4, 2000), sizes)
    with pytest.warns(UserWarning, match=r"get fewer than 2000 .*: 1942 in 'domain 0'"):
        train, test = parts_of(rule, domains)
    assert [len(part) for part in train] == [1942, 2000, 2000, 2000]
    assert [len(part) for part in test] == [485, 2365, 2439, 2357]


def test_listed_sizes_are_exact_or_refused():
    rule, domains = bound(Domains(4, [49, 49, 1, 2]), [99, 50])
    assert [len(part) for part in parts_of(rule, domains)[0]] == [49, 49, 1, 2]
    rule, domains = bound(Domains(4, [50, 49, 1, 2]), [99, 50])
    with pytest.raises(
        PartitionError, match=r"'domain 0' has 99 samples, too few for 2 client\(s\) \(from client 0\) of 50"
    ):
        parts_of(rule, domains)
    with pytest.raises(ValueError, match="or one for each of the 4 clients, got"):
        Domains(4, [3, 3])
    with pytest.raises(ValueError, match="max_share must be between 0 and 1"):
        Domains(2, max_share=1.5)


def test_what_cannot_be_met_is_named():
    rule, domains = bound(Domains(6), [30, 30, 2])
    with pytest.raises(
        PartitionError, match=r"'domain 2' has 2 samples, too few for 2 client\(s\) \(from client 4\) of any"
    ):
        parts_of(rule, domains)
    with pytest.raises(PartitionError, match="num_clients is 2, the data have 3 domains"):
        bound(Domains(2), [5, 5, 5])
    with pytest.raises(
        PartitionError, match=r"needs samples with a domain, and no separate test set: use DomainFolders"
    ):
        Domains(1).partition(np.zeros(30, dtype=np.int64))


class Toy(FederatedDataModule):
    """Inputs that say which sample they are; three domains of 40 samples, one class in the last domain alone."""

    def __init__(self, partition, *, with_domains=True, **kwargs):
        super().__init__(partition, **kwargs)
        self.with_domains = with_domains

    def load(self):
        domains = torch.arange(120) // 40
        targets = torch.where(domains == 2, 2, torch.arange(120) % 2)
        inputs = torch.arange(120, dtype=torch.float32)[:, None]
        named = {"train_domains": domains, "domain_names": ("x", "y", "z")} if self.with_domains else {}
        return Samples(inputs, targets, tuple("abc"), **named)


def ready(rule, **options):
    data = Toy(rule, **options)
    data.setup()
    return data


def test_a_class_that_one_client_alone_sees():
    data = ready(Domains(3, 20), validation_share=0.2)
    assert (data.class_counts() > 0).tolist() == [[True, True, False]] * 2 + [[False, False, True]]
    assert set(data.client_data(2).test.targets.tolist()) == {2}
    assert data.num_classes == 3


@pytest.mark.parametrize("base", [Domains(6, 2), Domains(6), FeatureShift(Domains(6, 2), [0])])
def test_drawn_sizes_leave_their_own_rest_for_tests(base):
    rule = Quantity(base, (3, 9, 14), seed=4)
    data = ready(rule)
    held = [len(data.client_data(k).train) + len(data.client_data(k).validation) for k in range(6)]
    assert held == rule.client_sizes().tolist()
    for client in range(6):
        assert len(data.client_data(client).test) == 40 - sum(held[client // 2 * 2 : client // 2 * 2 + 2])


def test_domains_need_domains_and_user_defined_rules_ignore_them():
    class Own(Partitioner):
        def partition(self, labels):
            return [[0, 1], [2, 3]]

    data = ready(Own(2), validation_share=0.0)
    assert [len(data.client_data(client).train) for client in range(2)] == [2, 2]
    with pytest.raises(PartitionError, match="use DomainFolders, or another rule"):
        ready(Domains(3), with_domains=False)
