"""Numerical tools: the precision of sums and products, and functions that can be differentiated at zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from pfl_lightning.functional.tensor_lists import float64_device


def check_tensor(name: str, value: Tensor, shape: Sequence[int | str], kind: str = "floating point") -> None:
    """Refuse a tensor of another shape or type than expected; no number of it is looked at.

    Args:
        name: what it is called.
        value: the tensor.
        shape: its sizes; a name stands for any size.
        kind: "floating point", "integers" or "bool".

    Raises:
        ValueError: names the expected and the given shape and type.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.numerics import check_tensor
        >>> check_tensor("labels", torch.zeros(3, dtype=torch.int64), ("N",), "integers")
    """
    integers = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    of_kind = {"floating point": value.is_floating_point(), "integers": integers, "bool": value.dtype == torch.bool}
    sizes = [size if isinstance(size, int) else got for size, got in zip(shape, value.shape, strict=False)]
    if not of_kind[kind] or len(shape) != value.ndim or list(value.shape) != sizes:
        expected = f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
        raise ValueError(f"{name} must be {kind} of shape {expected}, got {value.dtype} of shape {tuple(value.shape)}")


def in_double(values: Tensor) -> Tensor:
    """Return values in double precision, on the CPU where their device has none."""
    return values.to(float64_device(values.device), torch.float64)


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` (``vmap``, ``grad``) is at work; inside, values cannot be read."""
    return bool(torch._C._are_functorch_transforms_active())  # torch has no public name for it


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager that runs torch's CPU kernels on one thread and then restores the number of threads.

    It is meant for many small matrices. A second thread gains little on an idle machine; on a busy one the threads wait
    for one another at every kernel, which was seen to cost a factor of ten to thirty. Switching is free.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def safe_sqrt(values: Tensor) -> Tensor:
    """Square root with gradient zero, not infinity, at zero.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.numerics import safe_sqrt
        >>> values = torch.tensor([0.0, 4.0], requires_grad=True)
        >>> safe_sqrt(values).sum().backward()
        >>> values.grad  # 1 / (2 sqrt(4)) at 4
        tensor([0.0000, 0.2500])
    """
    positive = values > 0
    # Both branches of the outer where are differentiated, so the root must be harmless where it is not taken.
    return torch.where(positive, torch.where(positive, values, 1.0).sqrt(), 0.0)


def unit_rows(vectors: Tensor) -> Tensor:
    """Rows (N, d) divided by their L2 norm; a zero row stays zero, in value and gradient.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.numerics import unit_rows
        >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    norms = safe_sqrt(vectors.square().sum(dim=1, keepdim=True))
    positive = norms > 0
    return torch.where(positive, vectors / torch.where(positive, norms, 1.0), 0.0)


def at_least_single(values: Tensor) -> Tensor:
    """Values in single precision where they are in half precision, or less; otherwise the same tensor."""
    return values.float() if values.is_floating_point() and values.dtype.itemsize < 4 else values


def hits(scores: Tensor, labels: Tensor) -> Tensor:
    """Whether the class of the highest score is the label, (N,): never where a score is NaN.

    Args:
        scores: Class scores, (N, C).
        labels: Classes, (N,).

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.numerics import hits
        >>> hits(torch.tensor([[0.1, 0.3], [float("nan"), 0.0], [2.0, -1.0]]), torch.tensor([1, 0, 1])).tolist()
        [True, False, False]
    """
    return (scores.argmax(1) == labels) & ~scores.isnan().any(1)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Context manager in which products are computed in the precision of their factors."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


class _Product(Function):
    """X Y in the precision of X and Y, whatever autocast is in force.

    A Function, because `torch.func.grad` runs the backward pass where it is called, which may be under autocast: that
    would compute the products of the backward pass in half precision.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor) -> Tensor:
        with without_autocast(left.device):
            return left @ right

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        left, right = ctx.saved_tensors
        with without_autocast(left.device):
            for_left = gradient @ right.T if ctx.needs_input_grad[0] else None
            for_right = left.T @ gradient if ctx.needs_input_grad[1] else None
        return for_left, for_right


def product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product in the precision of the factors, forward and backward, also under autocast."""
    return cast(Tensor, _Product.apply(left, right))
