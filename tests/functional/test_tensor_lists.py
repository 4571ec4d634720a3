"""Lists of tensors at once: the same numbers as one by one."""

import math

import pytest
import torch

from pfl_lightning.functional.tensor_lists import copied, magnitudes, moved

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
