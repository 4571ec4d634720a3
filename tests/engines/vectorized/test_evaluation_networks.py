"""Evaluations of many clients at once, of whatever network, in whatever precision."""

from functools import partial

import pytest
import torch
from _helpers.engines import UNEQUAL, assert_evaluations_agree, evaluate, trained
from _helpers.toy import FEATURES, Toy, for_toy

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.methods import DualFed, FedBABU, FedBN, LocalOnly

# On encoders that have none.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no batch normalization. FedBN equals FedAvg")


def convolution(input_shape):
    """Over the inputs as images, in the channels-last layout."""
    layer = torch.nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last)
    norm, end = torch.nn.BatchNorm2d(4), torch.nn.Linear(8, FEATURES)
    encoder = torch.nn.Sequential(torch.nn.Unflatten(1, (1, 3, 2)), layer, norm, torch.nn.Flatten(), end)
    encoder.out_features = FEATURES
    return encoder


@pytest.mark.parametrize(("method", "part"), [(FedBN, "all"), (LocalOnly, "head")])
def test_convolutions_agree(method, part):
    fit = for_toy(method, lr=0.01, fine_tune=part)
    assert_evaluations_agree(fit, encoder=convolution, data=Toy(batch_size=9, **UNEQUAL))


@pytest.mark.parametrize("method", [DualFed, FedBABU])
def test_double_precision_agrees(method):
    """Scores are made single before the loss."""
    assert_evaluations_agree(for_toy(method, lr=0.02, fine_tune="all"), precision="64-true", atol=1e-6)


def test_fine_tuning_in_mixed_precision_is_near():
    federation = trained(partial(FedBABU, lr=0.02), precision="bf16-mixed", data=Toy(**UNEQUAL))
    expected = evaluate(federation, SequentialEngine())
    for one, other in zip(evaluate(federation, VectorizedEngine(forward="vmap")), expected, strict=True):
        assert one.test.loss == pytest.approx(other.test.loss, abs=1e-2)
