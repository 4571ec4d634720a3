"""Whether two values hold the same."""

from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from pfl_lightning.state.equality import same

NAN = float("nan")


class Table:
    """Compares as a table of pandas does."""

    def __init__(self, *cells):
        self.cells = np.array(cells)

    def __eq__(self, other):
        return self.cells == other.cells

    def equals(self, other):
        return np.array_equal(self.cells, other.cells)


def sparse(*values):
    return torch.tensor(values).to_sparse()


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("one", "equal", "other"),
    [
        (1, 1, 2),
        (1, 1, 1.0),
        (1, 1, True),
        ([1, {"a": (2, None)}], [1, {"a": (2, None)}], [1, {"a": (2, 3)}]),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (OrderedDict(a=1), OrderedDict(a=1), {"a": 1}),
        ({1, 2}, {2, 1}, {1, 3}),
        (deque([1, 2]), deque([1, 2]), deque([1])),
        ([1, 2], [1, 2], (1, 2)),
        (torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(1)),
        (sparse(0.0, 1.0), sparse(0.0, 1.0), sparse(0.0, 2.0)),
        (sparse(0.0, 1.0), torch.tensor([0.0, 1.0]), torch.zeros(2)),
        (torch.ones(2, device="meta"), torch.zeros(2, device="meta"), torch.ones(2)),
        ([torch.ones(2)], [torch.ones(2)], [torch.zeros(2)]),
        (np.ones(2), np.ones(2), np.ones(2, dtype=np.float32)),
        (np.float32(1), np.float32(1), np.float64(1)),
        (np.array(["a", None], object), np.array(["a", None], object), np.array(["a", "b"], object)),
        (generator(1), generator(1), generator(2)),
        (Table(1, 2), Table(1, 2), Table(1, 3)),
    ],
)
def test_values_hold_the_same_or_not(one, equal, other):
    assert same(one, one)
    assert same(one, equal)
    assert same(equal, one)
    assert not same(one, other)
    assert not same(other, one)


def test_nan_equals_nan_only_where_asked_for():
    one, other = torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0])
    assert not same(one, other)
    assert same(one, other, nan=True)
    assert same([{"a": one}], [{"a": other}], nan=True)
    assert not same(one, torch.tensor([1.0, NAN]), nan=True)


def test_values_that_cannot_be_compared_are_not_the_same():
    ragged = np.array([np.ones(2), np.ones(3)], object)
    assert not same(ragged, ragged.copy())
    assert not same({np.float64: SimpleNamespace(a=np.ones(2))}, {np.float64: SimpleNamespace(a=np.ones(2))})
    assert not same(object(), object())
