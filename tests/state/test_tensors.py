"""Named parts of a state."""

import pytest
import torch
from torch import nn

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.state.tensors import TensorDict, load_state, matching, select_state

NAMES = ["encoder.conv.weight", "encoder.conv.bias", "encoder.norm.running_mean", "head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("*",), NAMES),
        ((), []),
        (("head.*",), NAMES[3:]),
        (("*.bias", "encoder.conv.*"), [NAMES[0], NAMES[1], NAMES[4]]),
        (("head.weight", "head.*"), NAMES[3:]),
        (("encoder.norm.running_*",), NAMES[2:3]),
    ],
)
def test_matching_keeps_the_order_of_the_names(patterns, expected):
    assert matching(tuple(NAMES), tuple(patterns)) == tuple(expected)


def test_a_pattern_without_a_match_is_refused():
    with pytest.raises(ConfigurationError, match=r"'Head\.\*' matches no parameter or buffer; there are \['encoder"):
        matching(tuple(NAMES), ("head.*", "Head.*"))


def test_select_copies_and_load_writes_in_place():
    module = nn.BatchNorm1d(3)
    taken = select_state(module, ["weight", "running_mean"])
    weight = module.weight
    with torch.no_grad():
        weight.fill_(7)
    assert taken["weight"].tolist() == [1, 1, 1]
    load_state(module, {"weight": torch.tensor([1.0, 2, 3]), "running_mean": torch.tensor([4.0, 5, 6])})
    assert module.weight is weight
    assert weight.requires_grad
    assert weight.tolist() == [1, 2, 3]
    assert module.running_mean.tolist() == [4, 5, 6]
    shared = select_state(module, ["weight"], clone=False)["weight"]
    assert shared.data_ptr() == weight.data_ptr()
    assert not shared.requires_grad
    with pytest.raises(KeyError):
        load_state(module, {"wait": torch.zeros(1)})


class TestTensorDict:
    def test_keeps_names_with_dots_and_moves_with_its_module(self):
        holder = nn.Module()
        holder.content = TensorDict({"a.b": torch.ones(2), "c": torch.zeros(1)})
        assert holder.double().content.as_state()["a.b"].dtype == torch.float64
        assert list(holder.content.as_state()) == ["a.b", "c"]
        assert len(holder.content) == 2

    def test_grows_on_loading(self):
        full, empty = TensorDict({"a.b": torch.ones(2)}), TensorDict()
        empty.load_state_dict(full.state_dict())
        assert empty.as_state()["a.b"].tolist() == [1, 1]
        full.load_state_dict(TensorDict({"z": torch.zeros(1)}).state_dict())
        assert list(full.as_state()) == ["z"]

    def test_assigning_replaces_everything(self):
        content = TensorDict({"a": torch.ones(2)})
        content.assign({"b": torch.zeros(1, requires_grad=True)})
        assert list(content.as_state()) == ["b"]
        assert not content.as_state()["b"].requires_grad

    def test_what_is_not_persistent_is_not_saved(self):
        assert TensorDict({"a": torch.ones(2)}, persistent=False).state_dict() == {}
