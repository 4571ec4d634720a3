"""Low-rank codec of named tensors: singular vectors and values that keep a share of the squared norm."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pfl_lightning.functional.numerics import in_double

PARTS = ("left", "values", "right")
"""What follows a name and a colon: singular vectors (o, r), singular values (r,), singular vectors (r, rest)."""


@torch.no_grad()
def compress(tensor: Tensor, energy: float) -> tuple[Tensor, ...]:
    """Factors of a tensor, seen as a matrix (o, rest), that keep a share of its energy, the sum of its squares.

    The rank r is the smallest with s_1^2 + ... + s_r^2 >= energy * (s_1^2 + s_2^2 + ...), for the singular values s.
    The squared error is exactly the sum of those left out.

    Args:
        tensor: The tensor, (o, ...).
        energy: Share of the energy to keep, above 0 and at most 1.

    Returns:
        ``(left, values, right)`` of shapes (o, r), (r,), (r, rest), or the tensor alone where factors would not be
        smaller: vectors, integers, and ranks with r (o + rest + 1) >= o rest. At energy 1 always the tensor: nothing is
        lost, rounding included. Also where it is not finite, so that whoever checks it sees it.

    Raises:
        ValueError: ``energy`` is not above 0 and at most 1.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import compress, expand
        >>> tensor = torch.outer(torch.arange(1.0, 9.0), torch.ones(8))  # of rank one
        >>> [tuple(part.shape) for part in compress(tensor, energy=0.95)]
        [(8, 1), (1,), (1, 8)]
        >>> torch.allclose(expand(compress(tensor, energy=0.95), tensor.shape), tensor)
        True
        >>> [tuple(part.shape) for part in compress(torch.eye(8), energy=0.95)]  # no rank below 8 keeps that much
        [(8, 8)]
    """
    if isinstance(energy, bool) or not isinstance(energy, int | float) or not 0 < energy <= 1:
        raise ValueError(f"energy must be above 0 and at most 1, the share kept, got {energy!r}; 1 keeps all")
    if energy == 1 or tensor.ndim < 2 or tensor.numel() == 0 or not tensor.is_floating_point():
        return (tensor,)
    matrix = tensor.flatten(1)
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))  # torch decomposes no half precision
    if not bool(torch.isfinite(matrix).all()):
        return (tensor,)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    rank = _rank(values, energy)
    if rank * (sum(matrix.shape) + 1) >= matrix.numel():
        return (tensor,)
    parts = left[:, :rank], values[:rank], right[:rank]
    return tuple(part.to(tensor.dtype).contiguous() for part in parts)


@torch.no_grad()
def expand(parts: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
    """The tensor of a shape that :func:`compress` gave these parts for.

    Raises:
        ValueError: The parts are not those of a tensor of this shape.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import expand
        >>> left, values, right = torch.tensor([[1.0], [2.0]]), torch.tensor([3.0]), torch.tensor([[1.0, 0.0]])
        >>> expand((left, values, right), torch.Size((2, 2)))
        tensor([[3., 0.],
                [6., 0.]])
    """
    if len(parts) == 1 and parts[0].shape == shape:
        return parts[0]
    if len(parts) == 3 and len(shape) > 1:
        left, values, right = parts
        expected = [(shape[0], values.numel()), (values.numel(),), (values.numel(), math.prod(shape[1:]))]
        if [tuple(part.shape) for part in parts] == expected:
            return ((left * values) @ right).reshape(shape)
    raise ValueError(
        f"parts of shapes {[tuple(part.shape) for part in parts]} do not multiply to a tensor of shape {tuple(shape)}; "
        "expected that shape, or (o, r), (r,), (r, rest)"
    )


def compress_state(state: Mapping[str, Tensor], energy: float) -> dict[str, Tensor]:
    """Named tensors, each as :func:`compress` makes it.

    A tensor that is sent as it is keeps its name; factors are ``name:left``, ``name:values`` and ``name:right``.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import compress_state
        >>> content = compress_state({"bias": torch.ones(8), "weight": torch.ones(8, 8)}, energy=0.9)
        >>> {name: tuple(part.shape) for name, part in content.items()}
        {'bias': (8,), 'weight:left': (8, 1), 'weight:values': (1,), 'weight:right': (1, 8)}
    """
    content: dict[str, Tensor] = {}
    for name, tensor in state.items():
        parts = compress(tensor, energy)
        names = (name,) if len(parts) == 1 else tuple(f"{name}:{part}" for part in PARTS)
        content.update(zip(names, parts, strict=True))
    return content


def expand_state(content: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The named tensors that :func:`compress_state` gave this content for.

    Args:
        content: What :func:`compress_state` returned.
        shapes: Shape of each tensor, by name.

    Raises:
        ValueError: A name is missing or unknown, or a shape is another one.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import compress_state, expand_state
        >>> content = compress_state({"bias": torch.tensor([1.0, 2.0])}, energy=0.9)
        >>> expand_state(content, {"bias": torch.Size((2,))})
        {'bias': tensor([1., 2.])}
    """
    parts_of = {name: (name,) if name in content else tuple(f"{name}:{part}" for part in PARTS) for name in shapes}
    expected = {part for parts in parts_of.values() for part in parts}
    missing, surplus = sorted(expected - content.keys()), sorted(content.keys() - expected)
    if missing or surplus:
        raise ValueError(f"compressed tensors: missing {missing}, unexpected {surplus}")
    return {name: expand(tuple(content[part] for part in parts), shapes[name]) for name, parts in parts_of.items()}


def _rank(values: Tensor, energy: float) -> int:
    """The least number of singular values that hold the share of all squares; 0 where all are zero."""
    kept = in_double(values).square().cumsum(0)
    total = float(kept[-1])
    return int((kept < energy * total).sum()) + 1 if total > 0 else 0
