"""The low-rank codec against numpy's singular values and the definition of the rank."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_lightning.functional import compress, compress_state, expand, expand_state

ENERGIES = (0.5, 0.9, 0.95, 0.98, 0.999)
SHAPES = ((12, 20), (20, 12), (8, 3, 5, 5), (30, 4, 2))


def decaying(shape, seed=0):
    """A tensor whose singular values fall quickly, so that some rank saves bytes."""
    rng = np.random.default_rng(seed)
    o, rest = shape[0], int(np.prod(shape[1:]))
    left, _, right = np.linalg.svd(rng.normal(size=(o, rest)), full_matrices=False)
    values = 2.0 ** -np.arange(min(o, rest))
    return torch.tensor((left * values) @ right).reshape(shape)


def least_rank(tensor, energy):
    """By trying every rank, the full one included."""
    squares = np.linalg.svd(tensor.flatten(1).numpy(), compute_uv=False) ** 2
    return next(r for r in range(len(squares) + 1) if squares[:r].sum() >= energy * squares.sum() * (1 - 1e-12))


@pytest.mark.parametrize("energy", ENERGIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_rank_is_the_least_and_the_error_is_the_tail(shape, energy):
    tensor = decaying(shape)
    rank = least_rank(tensor, energy)
    parts = compress(tensor, energy)
    assert [tuple(part.shape) for part in parts] == [(shape[0], rank), (rank,), (rank, int(np.prod(shape[1:])))]
    squares = np.linalg.svd(tensor.flatten(1).numpy(), compute_uv=False) ** 2
    error = float((expand(parts, tensor.shape) - tensor).square().sum())
    assert error == pytest.approx(squares[rank:].sum(), rel=1e-9)
    assert error <= (1 - energy) * float(tensor.square().sum()) + 1e-12


@settings(deadline=None, max_examples=30)
@given(o=st.integers(1, 9), rest=st.integers(1, 9), energy=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_no_content_is_larger_than_the_tensor(o, rest, energy, seed):
    tensor = torch.randn(o, rest, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    parts = compress(tensor, energy)
    assert sum(part.numel() for part in parts) <= tensor.numel()
    error = float((expand(parts, tensor.shape) - tensor).square().sum())
    assert error <= (1 - energy) * float(tensor.square().sum()) + 1e-9


def test_full_energy_is_lossless_bit_by_bit():
    for shape in (*SHAPES, (7,), ()):
        tensor = torch.randn(shape)
        [sent] = compress(tensor, 1.0)
        assert sent is tensor
        assert expand((sent,), tensor.shape) is tensor


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(5), torch.tensor(3), torch.ones(4, 4, dtype=torch.int64), torch.eye(6), torch.randn(2, 2)],
    ids=["vector", "scalar", "integers", "flat spectrum", "too small"],
)
def test_what_factors_do_not_make_smaller_is_sent_as_it_is(tensor):
    [sent] = compress(tensor, 0.95)
    assert sent is tensor


def test_four_equal_singular_values_at_half_the_energy_keep_two():
    """The published search looks at no full rank and keeps none of a flat spectrum."""
    tensor = torch.zeros(4, 40, dtype=torch.float64)
    tensor[range(4), range(4)] = 3.0
    left, values, right = compress(tensor, 0.5)
    assert (left.shape, values.tolist(), right.shape) == ((4, 2), [3.0, 3.0], (2, 40))
    assert len(compress(tensor, 0.76)) == 1  # all four would be no smaller


def test_a_zero_tensor_costs_nothing():
    parts = compress(torch.zeros(6, 9), 0.95)
    assert sum(part.numel() for part in parts) == 0
    assert torch.equal(expand(parts, torch.Size((6, 9))), torch.zeros(6, 9))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(value):
    tensor = torch.full((6, 9), value)
    [sent] = compress(tensor, 0.95)
    assert sent is tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_types_are_kept(dtype):
    tensor = decaying((12, 20)).to(dtype)
    parts = compress(tensor, 0.95)
    assert {part.dtype for part in parts} == {dtype}
    torch.testing.assert_close(expand(parts, tensor.shape).double(), tensor.double(), rtol=0, atol=0.3)


def test_a_state_goes_there_and_back():
    state = {"encoder.weight": decaying((8, 3, 5, 5)), "encoder.bias": torch.randn(8), "count": torch.tensor(4)}
    content = compress_state(state, 0.95)
    assert list(content) == [
        *(f"encoder.weight:{part}" for part in ("left", "values", "right")),
        "encoder.bias",
        "count",
    ]
    back = expand_state(content, {name: tensor.shape for name, tensor in state.items()})
    assert list(back) == list(state)
    assert torch.equal(back["encoder.bias"], state["encoder.bias"])
    torch.testing.assert_close(
        back["encoder.weight"], expand(compress(state["encoder.weight"], 0.95), torch.Size((8, 3, 5, 5)))
    )


@pytest.mark.parametrize("energy", [0, -0.1, 1.0001, 2, float("nan"), float("inf"), True, "1", None])
def test_more_than_full_energy_and_none_are_refused(energy):
    with pytest.raises(ValueError, match=r"energy must be above 0 and at most 1, the share kept, .*; 1 keeps all"):
        compress(torch.ones(3, 3), energy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("b"), r"missing \['b:left', 'b:right', 'b:values'\]"),
        (lambda content: content.update(c=torch.ones(1)), r"unexpected \['c'\]"),
        (
            lambda content: content.update({"w:left": torch.ones(12, 3)}),
            r"do not multiply to a tensor of shape \(12, 20\)",
        ),
        (
            lambda content: content.update({"w:values": torch.ones(1, 2)}),
            r"do not multiply to a tensor of shape \(12, 20\)",
        ),
        (lambda content: content.update(b=torch.ones(3)), r"do not multiply to a tensor of shape \(7,\)"),
    ],
    ids=["missing", "unexpected", "rank", "dimensions", "dense"],
)
def test_content_of_other_tensors_is_refused(change, message):
    state = {"w": decaying((12, 20)), "b": torch.ones(7)}
    content = compress_state(state, 0.9)
    change(content)
    with pytest.raises(ValueError, match=message):
        expand_state(content, {name: tensor.shape for name, tensor in state.items()})
