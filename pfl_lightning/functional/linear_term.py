"""A loss term that is linear in the parameters, so that its gradient is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["linear_term"]


def linear_term(params: Mapping[str, Tensor], reference: Mapping[str, Tensor], slopes: Mapping[str, Tensor]) -> Tensor:
    """<s, p - r>, whose gradient in the parameters p is s: it moves every step by s.

    The backward pass does no more than that, where ordinary autograd would go back through difference, product and sum
    of every tensor.

    Args:
        params: p, by name; further names are ignored.
        reference: r, of the names of the slopes, without gradient.
        slopes: s, without gradient.

    Returns:
        A scalar.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.linear_term import linear_term
        >>> weight = torch.tensor([4.0, 6.0], requires_grad=True)
        >>> term = linear_term({"weight": weight}, {"weight": torch.ones(2)}, {"weight": torch.tensor([0.5, 2.0])})
        >>> term.item(), torch.autograd.grad(term, weight)  # 0.5 * 3 + 2 * 5
        (11.5, (tensor([0.5000, 2.0000]),))
    """
    at, start = [params[name] for name in slopes], [reference[name] for name in slopes]
    return cast(Tensor, _LinearTerm.apply(*at, *start, *slopes.values()))  # type: ignore[no-untyped-call]


class _LinearTerm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        """The term, of as many parameters, references and slopes."""
        count = len(tensors) // 3
        triples = zip(tensors[:count], tensors[count : 2 * count], tensors[2 * count :], strict=True)
        return torch.stack([(slope * (at - start)).sum() for at, start, slope in triples]).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep the slopes."""
        ctx.save_for_backward(*inputs[2 * len(inputs) // 3 :])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The slopes, as the parameters' gradients."""
        slopes = ctx.saved_tensors
        return (*(slope * gradient for slope in slopes), *[None] * (2 * len(slopes)))
