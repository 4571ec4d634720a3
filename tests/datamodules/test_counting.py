"""Index lists in one array."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfl_lightning.datamodules import class_counts
from pfl_lightning.datamodules.counting import Parts

lists = st.lists(st.lists(st.integers(0, 50), max_size=6).map(lambda own: np.array(own, dtype=np.int64)), min_size=1)


@given(lists, st.integers(0, 2**20))
def test_parts_are_a_sequence_of_lists(given_lists, seed):
    parts = Parts.of(given_lists)
    assert Parts.of(parts) is parts
    assert [own.tolist() for own in parts] == [own.tolist() for own in given_lists]
    assert parts[-1].tolist() == given_lists[-1].tolist()
    assert parts.owners.tolist() == [client for client, own in enumerate(given_lists) for _ in own]
    assert [parts.owner(place) for place in range(len(parts.values))] == parts.owners.tolist()
    middle = slice(len(given_lists) // 3, len(given_lists))
    assert [own.tolist() for own in parts.block(middle)] == [own.tolist() for own in given_lists[middle]]
    kept = np.random.default_rng(seed).random(len(parts.values)) < 0.5
    assert [own.tolist() for own in parts.where(kept)] == [
        own[kept[end - len(own) : end]].tolist() for own, end in zip(given_lists, parts.ends)
    ]
    shuffled = np.random.default_rng(seed).permutation(len(parts.values))
    found = Parts.sorted(parts.values[shuffled], parts.owners[shuffled], len(parts))
    assert [own.tolist() for own in found] == [sorted(own.tolist()) for own in given_lists]


def test_class_counts_refuse_classes_that_there_are_not():
    with pytest.raises(ValueError, match="classes must be from 0 to 1, got 0 to 2"):
        class_counts([0, 1, 2], [np.array([0]), np.array([2])], 2)
