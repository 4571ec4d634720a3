"""Weights, buffers and layers that a network has in several places."""

from functools import partial

import pytest
import torch
from _helpers.engines import UNEQUAL, assert_agree, assert_evaluations_agree
from _helpers.toy import FEATURES, Toy

from pfl_lightning.methods import FedAvg, LocalOnly


class Tied(torch.nn.Module):
    """Two layers with one weight, and a layer with normalization that is found under two names."""

    out_features = FEATURES

    def __init__(self, inputs):
        super().__init__()
        self.first, self.second = torch.nn.Linear(inputs, FEATURES), torch.nn.Linear(inputs, FEATURES)
        self.second.weight = self.first.weight
        self.last = torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.BatchNorm1d(FEATURES))
        self.again = self.last

    def forward(self, inputs):
        return self.again(torch.tanh(self.last(self.first(inputs) - self.second(inputs).abs())))


class Masked(torch.nn.Module):
    def __init__(self, inputs, mask):
        super().__init__()
        self.linear = torch.nn.Linear(inputs, FEATURES)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, inputs):
        return torch.tanh(self.linear(inputs)) * self.mask


def masked(input_shape):
    """Layers that share a non-persistent buffer."""
    mask = torch.tensor([1.0, 0.0, 1.0, 2.0])
    encoder = torch.nn.Sequential(Masked(input_shape[0], mask), Masked(FEATURES, mask))
    encoder.out_features = FEATURES
    return encoder


def tied(input_shape):
    return Tied(input_shape[0])


METHODS = pytest.mark.parametrize("method", [FedAvg, LocalOnly], ids=lambda method: method.__name__)
ENCODERS = pytest.mark.parametrize("encoder", [tied, masked], ids=lambda encoder: encoder.__name__)


@METHODS
@ENCODERS
def test_fits_agree(method, encoder):
    fit = partial(method, lr=0.01, epochs=2)
    assert assert_agree(fit, 2, encoder=encoder, data=Toy(batch_size=9)) == ""


@METHODS
@ENCODERS
def test_evaluations_agree(method, encoder, tuned):
    fit = partial(method, lr=0.01, fine_tune="all")
    assert_evaluations_agree(fit, encoder=encoder, data=Toy(batch_size=9, **UNEQUAL))
    assert tuned == [5]
