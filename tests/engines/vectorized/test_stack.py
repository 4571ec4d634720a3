"""Rows of a stack as states of a module, which has its own tensors again afterwards."""

import pytest
import torch
from torch import nn

from pfl_lightning.engines.vectorized.stack import Stack, full_state, in_state
from pfl_lightning.methods import FedAvg
from pfl_lightning.state.tensors import TensorDict


class Net(nn.Module):
    """With a tied weight, running statistics, and buffers that are in no state_dict."""

    out_features = 3

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.held = TensorDict({"a.b": torch.zeros(2)}, persistent=False)

    def forward(self, x):
        return self.second(self.norm(self.first(x))) * self.scale


def client():
    return FedAvg(Net(), 2)


def filled(state, number):
    return {name: torch.full_like(value, number) for name, value in state.items()}


def put(stack, state):
    class Row:
        state = None

    stack.add(row := Row(), state)
    return row


def test_a_module_has_the_state_without_a_copy_and_then_its_own_tensors():
    model = client()
    own = full_state(model)
    before = {name: (value.clone(), value.data_ptr()) for name, value in own.items()}
    stack = Stack(2, own)
    rows = [put(stack, filled(own, number)) for number in (5, 7)]
    for number, row in zip((5, 7), rows, strict=True):
        with in_state(model, row.state):
            now = full_state(model)
            assert now.keys() == own.keys()
            for name, value in now.items():
                assert value.data_ptr() == stack.tensors[name][rows.index(row)].data_ptr()
                assert (value == number).all()
            assert model.encoder.second.weight is model.encoder.first.weight
            model.encoder.first.bias.data.fill_(9)
        assert (row.state["encoder.first.bias"] == 9).all()  # changes are the client's
    after = full_state(model)
    assert list(after) == list(before)
    for name, (value, memory) in before.items():
        assert after[name].equal(value)
        assert after[name].data_ptr() == memory
    assert "encoder.scale" not in model.state_dict()
    assert "encoder.held.a/b" not in model.state_dict()


def test_a_module_has_its_own_tensors_also_after_an_error():
    model = client()
    own = full_state(model)
    stack = Stack(1, own)
    row = put(stack, filled(own, 5))

    def fail():
        with in_state(model, row.state):
            model.encoder.held.assign({"another": torch.ones(1)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert full_state(model).keys() == own.keys()
    assert all(value.data_ptr() == own[name].data_ptr() for name, value in full_state(model).items())


def test_what_is_kept_of_a_state_is_not_taken_for_that_of_another():
    """Such as the features of a client's samples, which are kept as long as the versions of the encoder's tensors."""
    model = client()
    own = full_state(model)
    stack, seen = Stack(2, own), []
    tensors = [*model.encoder.parameters(), model.encoder.norm.running_mean]
    for row in [put(stack, filled(own, number)) for number in (5, 7)]:
        seen.append([tensor._version for tensor in tensors])
        with in_state(model, row.state):
            seen.append([tensor._version for tensor in tensors])
    seen.append([tensor._version for tensor in tensors])
    for versions in zip(*seen, strict=True):
        assert sorted(set(versions)) == list(versions)
