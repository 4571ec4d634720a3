"""A loss term that is quadratic in the parameters, whose backward pass is one difference and one product a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["square_term"]


def square_term(params: Sequence[Tensor], reference: Sequence[Tensor] | None = None) -> Tensor:
    """Sum of ||p - r||^2 over the tensors, whose gradient in a parameter p is 2 (p - r).

    A step of a small model takes little time, and ordinary autograd would add a chain of kernels for every tensor to
    it, forward and back.

    Args:
        params: p, at least one.
        reference: r, of the same shapes; ``None`` for zero, which leaves the squared norm.

    Returns:
        A scalar, under autocast in single precision.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.square_term import square_term
        >>> weight = torch.tensor([4.0, 6.0], requires_grad=True)
        >>> term = square_term([weight], [torch.tensor([1.0, 2.0])])
        >>> term.item(), torch.autograd.grad(term, weight)  # 3^2 + 4^2
        (25.0, (tensor([6., 8.]),))
        >>> square_term([weight]).item()
        52.0
    """
    if reference is None:
        return cast(Tensor, _SquaredNorm.apply(*params))  # type: ignore[no-untyped-call]
    return cast(Tensor, _SquaredDistance.apply(*params, *reference))  # type: ignore[no-untyped-call]


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


class _SquaredDistance(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        """The term, of as many parameters and references."""
        count = len(tensors) // 2
        pairs = zip(tensors[:count], tensors[count:], strict=True)
        # mse_loss with "sum" is ||p - r||^2; autocast runs it in single precision
        return _total([F.mse_loss(parameter, target, reduction="sum") for parameter, target in pairs])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep the tensors, which exist anyway, and not their differences."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """2 (p - r) for parameters, and its opposite for references that want one."""
        tensors = ctx.saved_tensors
        count, needed = len(tensors) // 2, ctx.needs_input_grad
        found: list[Tensor | None] = [None] * len(tensors)
        scale = 2 * gradient
        for place, (parameter, target) in enumerate(zip(tensors[:count], tensors[count:], strict=True)):
            if needed[place]:
                found[place] = (parameter - target) * scale
            if needed[count + place]:
                found[count + place] = (target - parameter) * scale
        return tuple(found)


class _SquaredNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*params: Tensor) -> Tensor:
        """The term."""
        return _total([parameter.square().sum() for parameter in params])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep the parameters."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """2 p."""
        scale = 2 * gradient
        found = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(parameter * scale if needed else None for parameter, needed in found)
