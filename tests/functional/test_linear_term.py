"""A term with given gradients against ordinary autograd."""

import pytest
import torch
from torch.func import grad, vmap

from pfl_lightning.functional.losses import linear_term

SHAPES = {"weight": (3, 4, 2, 2), "bias": (5,)}


def named(seed, *leading):
    torch.manual_seed(seed)
    found = {name: torch.randn(*leading, *shape) for name, shape in SHAPES.items()}
    if not leading:
        found["weight"] = found["weight"].to(memory_format=torch.channels_last)
    return found


def by_autograd(params, reference, slopes):
    return torch.stack([(slope * (params[name] - reference[name])).sum() for name, slope in slopes.items()]).sum()


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_value_and_gradients_are_those_of_autograd(scale):
    params, reference, slopes = named(0), named(1), named(2)
    found = []
    for term in (linear_term, by_autograd):
        at = {name: tensor.clone().requires_grad_() for name, tensor in params.items()}
        value = term({**at, "further": torch.ones(1)}, reference, slopes)
        found.append((value, *torch.autograd.grad(scale * value, list(at.values()))))
    assert all(torch.equal(got, expected) for got, expected in zip(*found, strict=True))


def test_clients_can_be_vectorized():
    stacks = named(0, 6), named(1, 6), named(2, 6)
    got, expected = (vmap(grad(term))(*stacks) for term in (linear_term, by_autograd))
    assert all(torch.equal(got[name], expected[name]) for name in SHAPES)
