"""Draws of many clients at once are those that NumPy makes for each client alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_lightning.datamodules.counting import Parts
from pfl_lightning.datamodules.draws import BLOCK, blocks, choices, draw_of_classes, permutations

fast = settings(max_examples=25, deadline=None, derandomize=True)
keys = st.lists(st.integers(0, 2**70), min_size=1, max_size=5)
clients_and_sizes = st.tuples(st.integers(1, 150), st.integers(0, 2**31), st.integers(1, 70))


@fast
@given(keys, clients_and_sizes)
def test_permutations(key, drawn):
    number, seed, most = drawn
    rng = np.random.default_rng(seed)
    clients, sizes = rng.choice(10**6, number, replace=False), rng.integers(0, most, number)
    expected = [np.random.default_rng([*key, client]).permutation(size) for client, size in zip(clients, sizes)]
    assert np.array_equal(permutations(key, clients, sizes), np.concatenate(expected))


@fast
@given(keys, clients_and_sizes, st.lists(st.integers(0, 90), min_size=1, max_size=6))
def test_choices(key, drawn, supply):
    number, seed, most = drawn
    rng = np.random.default_rng(seed)
    numbers, supply = rng.permutation(sum(supply) + 5), np.array([*supply, 5])
    pools = Parts(numbers, supply)
    wanted = rng.integers(0, np.minimum(supply, most) + 1, (number, len(supply)))  # up to all there are: none is drawn
    clients = rng.choice(10**6, number, replace=False)

    def of_one(client, row):
        own = np.random.default_rng([*key, client])
        found = [own.choice(pool, size, replace=False, shuffle=False) for pool, size in zip(pools, row) if size]
        return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *found]))

    expected = [of_one(client, row) for client, row in zip(clients, wanted)]
    assert np.array_equal(choices(key, clients, wanted, pools), np.concatenate(expected))


def test_choices_of_large_pools_and_many():
    pools, sizes = Parts(np.arange(20_000), np.array([20_000])), np.array([*[3] * 2000, 1200])
    found = Parts(choices([1, 2], np.arange(2001), sizes[:, None], pools), sizes)
    for client in (0, 1999, 2000):  # the last by a shuffle of the pool's end
        drawn = np.random.default_rng([1, 2, client]).choice(20_000, sizes[client], replace=False, shuffle=False)
        assert np.array_equal(found[client], np.sort(drawn))


@pytest.mark.parametrize("first", [0, 3])
def test_draws_of_classes_take_each_clients_first_of_a_random_order(first):
    rng = np.random.default_rng(0)
    labels, parts = rng.integers(0, 4, 900), Parts(rng.permutation(900), rng.multinomial(900, [1 / 60] * 60))
    drawn = draw_of_classes(labels, parts, lambda held, clients: held // 2, [7, 1], first)
    mask = Parts(drawn, parts.sizes)
    for client, part in enumerate(parts):
        order = part[np.random.default_rng([7, 1, client + first]).permutation(len(part))]
        half = [order[labels[order] == c][: np.count_nonzero(labels[order] == c) // 2] for c in range(4)]
        assert sorted(part[mask[client]].tolist()) == sorted(np.concatenate(half).tolist())


def test_blocks_cover_all_clients_once():
    for number, classes in ((1, 10), (BLOCK, 10), (3 * BLOCK + 1, 10), (50, 2**18)):
        assert [c for block in blocks(number, classes) for c in range(block.start, block.stop)] == [*range(number)]
