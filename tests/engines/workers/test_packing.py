"""Objects sent to another process and back, with the bytes of their tensors in separate buffers."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning.engines.workers.packing import DATA_SETS, pack, unpack

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def bits(tensor):
    """The values' bytes in the order of the indices."""
    return b"".join(bytes(value.contiguous().reshape(1).view(torch.uint8).tolist()) for value in tensor.reshape(-1))


@settings(deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 3), max_size=4),
    order=st.permutations(range(4)),
    copied=st.booleans(),
    seed=st.integers(0, 99),
)
def test_tensors_keep_values_type_and_layout(dtype, shape, order, copied, seed):
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    values = source[..., : dtype.itemsize].contiguous()
    values = values[..., 0] > 127 if dtype is torch.bool else values.view(dtype).squeeze(-1)
    tensor = values.permute([d for d in order if d < len(shape)])
    found = unpack(pack([tensor]), copy=copied)[0]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    if tensor.numel() > 1:
        assert found.stride() == tensor.stride()
    assert bits(found) == bits(tensor)


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("shape", [(8, 1, 3, 3), (1, 8, 3, 3), (8, 4, 1, 1), (1, 1, 3, 3), (8, 1, 1, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("form", [torch.channels_last, torch.contiguous_format], ids=["channels last", "contiguous"])
def test_strides_of_single_channels_stay(shape, form, copied):
    """By the strides of dimensions of size 1, too, PyTorch tells channels-last weights of a convolution."""
    tensor = torch.randn(shape).to(memory_format=form)
    for source in (tensor, tensor.as_strided(shape, [s + (n == 1) for n, s in zip(shape, tensor.stride())])):
        found = unpack(pack(source), copy=copied)
        assert found.stride() == source.stride()
        assert torch.equal(found, source)
        for known in (torch.channels_last, torch.contiguous_format):
            assert found.is_contiguous(memory_format=known) == source.is_contiguous(memory_format=known)


def test_a_slice_and_an_expanded_tensor_are_sent_without_the_rest_of_their_storage():
    whole = torch.arange(1000.0).reshape(10, 100)
    packed = pack(whole[:, ::50])
    assert packed.num_bytes < 1000
    assert torch.equal(unpack(packed), whole[:, ::50])
    wide = torch.ones(1).expand(5)
    assert torch.equal(unpack(pack(wide)), wide)
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(unpack(pack(conjugate)), conjugate)


def test_what_a_receiver_has_is_not_sent():
    known, fresh = torch.randn(500, 10), torch.randn(3)
    packed = pack({"known": known, "again": known, "fresh": fresh}, {id(known): (7, 1)})
    assert packed.num_bytes < 1000
    found = unpack(packed, {7: [torch.zeros(1), known]})
    assert found["known"] is found["again"] is known
    assert torch.equal(found["fresh"], fresh)


def test_a_data_set_that_a_receiver_has_is_not_sent_inside_what_holds_it():
    known = TensorDataset(torch.randn(500, 10))
    packed = pack({"loaders": [DataLoader(known, 4)], "kept": known}, {id(known): (DATA_SETS, 0)})
    assert packed.num_bytes < 2000
    theirs = TensorDataset(torch.randn(500, 10))
    found = unpack(packed, {DATA_SETS: [theirs]})
    assert found["kept"] is found["loaders"][0].dataset is theirs


def test_a_copy_is_writable_and_aligned_as_torch_does_it_and_a_view_shares_the_buffer():
    tensor, array = torch.randn(33), np.arange(4.0)
    packed = pack((tensor, array))
    copied, own = unpack(packed)
    copied += 1
    own += 1
    assert copied.data_ptr() % 64 == 0
    assert torch.equal(unpack(packed)[0], tensor)
    shared, _ = unpack(packed, copy=False)
    assert shared.data_ptr() == packed.buffers[0].ctypes.data


@pytest.mark.parametrize("channels", [1, 3])
def test_a_network_comes_back_as_it_was(channels):
    net = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    net = net.to(memory_format=torch.channels_last)
    net.append(net[2])  # one layer in two places
    net[0].weight.requires_grad_(False)
    net.note = lambda value: value + 1  # goes by value
    found = unpack(pack(net))
    assert found[3] is found[2]
    assert found.note(1) == 2
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in net.parameters()]
    assert [p.stride() for p in found.parameters()] == [p.stride() for p in net.parameters()]
    inputs = torch.randn(2, channels, 8, 8).to(memory_format=torch.channels_last)
    received = unpack(pack(inputs), copy=False)
    assert received.stride() == inputs.stride()
    assert torch.equal(found(received), copy.deepcopy(net)(inputs))
    found(inputs).sum().backward()
    torch.optim.SGD(found.parameters(), lr=0.1).step()
    assert not torch.equal(found[2].weight, net[2].weight)


def test_gradients_are_wanted_as_before():
    leaf = torch.randn(3, requires_grad=True)
    assert unpack(pack(leaf)).requires_grad
    assert unpack(pack(leaf), copy=False).requires_grad


def test_what_cannot_be_pickled_says_so():
    with pytest.raises((TypeError, pickle.PicklingError)):
        pack((torch.ones(2), (x for x in "abc")))
