"""Clipping of every client's gradients, alone and under the engine."""

import pytest
import torch
from _helpers.toy import assert_same, run, whole_state
from torch import nn

from pfl_lightning import SequentialEngine, VectorizedEngine
from pfl_lightning.engines.vectorized.phase import clip_per_client
from pfl_lightning.methods import FedETF


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_parameters_without_dimensions_are_clipped_with_the_others(algorithm):
    torch.manual_seed(0)
    gradients = {"weight": torch.randn(3, 4, 2), "bias": torch.randn(3, 4), "scale": torch.randn(3)}
    expected = []
    for client in range(3):
        own = [nn.Parameter(torch.zeros_like(gradient[client])) for gradient in gradients.values()]
        for parameter, gradient in zip(own, gradients.values(), strict=True):
            parameter.grad = gradient[client].clone()
        clip = nn.utils.clip_grad_norm_ if algorithm == "norm" else nn.utils.clip_grad_value_
        clip(own, 0.3)
        expected.append([parameter.grad for parameter in own])
    clip_per_client(gradients, 0.3, algorithm)
    for gradient, wanted in zip(gradients.values(), zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(gradient, torch.stack(wanted))


def test_a_method_with_a_scalar_that_trains_is_clipped():
    """The scale of FedETF has no dimensions."""
    engines = VectorizedEngine(forward="vmap", gradient_clip_val=0.1), SequentialEngine(gradient_clip_val=0.1)
    got, expected = (run(FedETF, engine=engine, precision="64-true", limit_val_batches=0) for engine in engines)
    assert_same(whole_state(got), whole_state(expected), atol=1e-9)
