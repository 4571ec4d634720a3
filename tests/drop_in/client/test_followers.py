"""Which frozen networks may be moving averages of others, by their layers and shapes."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pfl_lightning.drop_in.client.copies import followers, frozen_parameters


def layers(width=4):
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))


def frozen(module):
    return copy.deepcopy(module).requires_grad_(False)


def module(**parts):
    return nn.ModuleDict(parts)


def with_layers_in_a_row():
    stack = nn.Sequential(*(layers() for _ in range(3)))
    stack[0].requires_grad_(False)
    return module(stack=stack)


def adapted():
    """As peft keeps a classifier of which it trains a copy."""
    classifier = nn.Linear(4, 2)
    return module(classifier=module(original_module=frozen(classifier), modules_to_save=module(default=classifier)))


student, layer = layers(), nn.Linear(4, 4)
CASES = {
    "a teacher": (module(student=student, teacher=frozen(student)), ["teacher"]),
    "of other values": (module(student=student, teacher=frozen(layers())), ["teacher"]),
    "of another width": (module(student=student, teacher=frozen(layers(5))), []),
    "in a wrapper": (module(student=student, average=AveragedModel(student).requires_grad_(False)), ["average"]),
    "in parts": (
        module(body=student, head=layers(6), old=module(body=frozen(student), head=frozen(layers(6)))),
        ["old"],
    ),
    "a layer": (module(layer=layer, target=frozen(layer)), ["target"]),
    "a layer of the same shape": (module(layer=layer, backbone=frozen(nn.Linear(4, 4))), []),
    "layers in a row": (with_layers_in_a_row(), []),
    "a classifier of peft": (adapted(), []),
    "nothing frozen": (module(one=layers(), other=layers()), []),
}


@pytest.mark.parametrize(("network", "names"), CASES.values(), ids=CASES)
def test_followers(network, names):
    assert followers(network) == names
    still = {name for name, p in network.named_parameters() if not p.requires_grad}
    assert frozen_parameters(network) == {name for name in still if not name.startswith(tuple(f"{n}." for n in names))}
    assert frozen_parameters(network, ()) == set()
    assert frozen_parameters(network, ["*"]) == still


def test_the_average_is_of_the_student():
    assert torch.equal(AveragedModel(student).module[0].weight, student[0].weight)
