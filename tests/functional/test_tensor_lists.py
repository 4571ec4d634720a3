"""Lists of tensors at once: the same numbers as one by one."""

import math

import pytest
import torch

from pfl_lightning.functional.tensor_lists import copied, flat, magnitudes, memory_order, moved, shaped

TENSORS = [
    torch.tensor([1.5, -3.0]),
    torch.tensor(True),
    torch.tensor([[1, -9], [3, 4]], dtype=torch.int64),
    torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last),
    torch.tensor(2.5, dtype=torch.float64),
    torch.ones(0),
    torch.tensor([1.0, -0.5], dtype=torch.float16),
    torch.tensor([3.0 + 4.0j]),
    torch.tensor([-128], dtype=torch.int8),
    torch.arange(6.0)[::2],
]


def of_one(tensor):
    """The slow way."""
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
    return values.abs().max().item() if values.numel() else 0.0


def test_magnitudes():
    assert magnitudes(TENSORS) == [of_one(tensor) for tensor in TENSORS]
    assert magnitudes([]) == []


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_magnitudes_of_what_is_not_finite(wrong):
    found = magnitudes([torch.ones(3), torch.tensor([1.0, wrong, 5.0])])
    assert found[0] == 1.0
    assert not math.isfinite(found[1])
    assert math.isnan(found[1]) == math.isnan(wrong)


def test_what_is_there_stays():
    assert all(one is other for one, other in zip(moved(TENSORS, torch.device("cpu")), TENSORS, strict=True))
    assert moved([], torch.device("cpu")) == []


def test_what_cannot_be_packed_is_moved_alone():
    found = moved([torch.ones(2), torch.ones(3, dtype=torch.int64)], torch.device("meta"))
    assert [(one.device.type, one.shape, one.dtype) for one in found] == [
        ("meta", (2,), torch.float32),
        ("meta", (3,), torch.int64),
    ]


def test_copies():
    found = copied(TENSORS)
    for one, other in zip(found, TENSORS, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
        assert one.numel() == 0 or one.data_ptr() != other.data_ptr()
    weight = torch.nn.Parameter(torch.ones(2))
    assert not copied([weight])[0].requires_grad


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 1, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(3, 4).T,
        torch.randn(2, 3),
        torch.tensor(7),
        torch.ones(0, 3),
    ],
)
def test_numbers_in_the_order_of_memory(tensor):
    numbers = flat(tensor)
    assert numbers.is_contiguous()
    assert numbers.data_ptr() == tensor.data_ptr()
    back = shaped(numbers, tensor.shape, memory_order(tensor))
    assert torch.equal(back, tensor)
    assert [n for n, size in zip(back.stride(), back.shape, strict=True) if size > 1] == [
        n for n, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ]


def test_numbers_with_gaps_are_copied():
    tensor = torch.randn(4, 6)[:, ::2]
    assert torch.equal(flat(tensor), tensor.reshape(-1))
