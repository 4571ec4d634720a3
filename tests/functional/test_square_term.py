"""The quadratic term against the same sum by ordinary autograd."""

import pytest
import torch

from pfl_lightning.functional.losses import square_term

SHAPES = ((2, 3), (4,), (2, 3, 3, 3))


def tensors(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    made = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    made[-1] = made[-1].contiguous(memory_format=torch.channels_last)
    return made


def plain(params, reference):
    return torch.stack([(p - r).square().sum() for p, r in zip(params, reference, strict=True)]).sum()


@pytest.mark.parametrize("with_reference", [True, False])
def test_value_and_gradients(with_reference):
    params = [p.requires_grad_() for p in tensors(0)]
    reference = [r.requires_grad_(with_reference) for r in tensors(1)] if with_reference else None
    zeros = [torch.zeros_like(p) for p in params]
    leaves = params + (reference or [])
    value, expected = 0.3 * square_term(params, reference), 0.3 * plain(params, reference or zeros)
    assert value.item() == pytest.approx(expected.item(), rel=1e-14)
    found = torch.autograd.grad(value, leaves)
    for got, wanted in zip(found, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-14, atol=0)
        assert got.stride() == wanted.stride()


@pytest.mark.parametrize("with_reference", [True, False])
def test_derivatives_of_both_orders(with_reference):
    params = [p.requires_grad_() for p in tensors(0)]
    reference = tensors(1) if with_reference else None
    assert torch.autograd.gradcheck(lambda *p: square_term(p, reference), params)
    assert torch.autograd.gradgradcheck(lambda *p: square_term(p, reference), params)


def test_parameters_that_do_not_train_get_nothing():
    params = tensors(0)
    params[0].requires_grad_()
    square_term(params, tensors(1)).backward()
    assert params[0].grad is not None
    assert params[1].grad is None


@pytest.mark.parametrize("batched_reference", [True, False])
def test_vectorized_over_clients(batched_reference):
    clients = [tensors(seed) for seed in range(3)]
    stacked = [torch.stack(parts) for parts in zip(*clients, strict=True)]
    reference = [torch.stack(parts) for parts in zip(*[tensors(9), tensors(8), tensors(7)], strict=True)]
    if not batched_reference:
        reference = [part[0] for part in reference]
    gradient = torch.func.vmap(
        torch.func.grad_and_value(lambda p, r: square_term(p, r)), (0, 0 if batched_reference else None)
    )
    gradients, values = gradient(stacked, reference)
    for row, params in enumerate(clients):
        own = [part[row] for part in reference] if batched_reference else reference
        assert values[row].item() == pytest.approx(plain(params, own).item(), rel=1e-14)
        for got, p, r in zip(gradients, params, own, strict=True):
            torch.testing.assert_close(got[row], 2 * (p - r), rtol=1e-14, atol=0)


def test_autocast_computes_in_single_precision():
    params, reference = tensors(0, torch.float32), tensors(1, torch.float32)
    expected = square_term(params, reference)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(square_term(params, reference), expected)
