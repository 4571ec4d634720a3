"""Lists of tensors handled at once: one copy between host and device, one wait, and few launches on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from pfl_lightning.functional.numerics import float64_device

__all__ = ["all_within", "copied", "magnitudes", "moved", "unusual_kind", "write"]

HOST = torch.device("cpu")

_FLOATS, _WHOLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16), (torch.int64, torch.int32, torch.int16)
COMPARED = frozenset((*_FLOATS, *_WHOLE, torch.int8, torch.uint8, torch.bool))
"""Types for which torch finds the extremes; others are converted."""


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors on a device: those that are there already as they are, the others sent together.

    Dense tensors of one device are packed into one buffer, pinned on the host of a CUDA device, which is sent by a
    single copy; what arrives are views of its memory.

    Args:
        tensors: Tensors of any devices and types.
        device: Where they are to be; one without a number is any of its type.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.tensor_lists import moved
        >>> tensors = [torch.ones(2), torch.tensor(True)]
        >>> moved(tensors, torch.device("cpu"))[1] is tensors[1]
        True
    """
    found = list(tensors)
    kind, number = device.type, device.index
    away = [n for n, one in enumerate(found) if one.device.type != kind or number not in (None, one.device.index)]
    if len(away) < 2 or not all(_is_plain(found[n]) and found[n].device == found[away[0]].device for n in away):
        for n in away:
            found[n] = found[n].to(device)
        return found
    away.sort(key=lambda n: -found[n].element_size())  # so that every tensor begins at a multiple of its numbers' size
    parts = [found[n].detach().contiguous().reshape(-1).view(torch.uint8) for n in away]
    size, source = sum(map(len, parts)), parts[0].device
    packed, arrived = (
        torch.empty(size, dtype=torch.uint8, device=one, pin_memory=(one.type, other.type) == ("cpu", "cuda"))
        for one, other in ((source, device), (device, source))
    )
    arrived.copy_(torch.cat(parts, out=packed), non_blocking=device.type == "cuda")
    for n, part in zip(away, arrived.split(list(map(len, parts))), strict=True):
        found[n] = part.view(found[n].dtype).view(found[n].shape)
    return found


def unusual_kind(tensor: Tensor) -> str | None:
    """What kind of tensor it is, if not a dense one with numbers.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.tensor_lists import unusual_kind
        >>> unusual_kind(torch.eye(2)), unusual_kind(torch.eye(2).to_sparse())
        (None, 'torch.sparse_coo')
    """
    if tensor.is_meta or tensor.is_quantized:
        return "meta" if tensor.is_meta else "quantized"
    return str(tensor.layout) if tensor.layout != torch.strided or tensor.is_nested else None


def _is_plain(tensor: Tensor) -> bool:
    return unusual_kind(tensor) is None and not tensor.is_conj() and not tensor.is_neg()


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of detached tensors.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.tensor_lists import copied
        >>> copied([torch.ones(2)])
        [tensor([1., 1.])]
    """
    plain = [one.detach() for one in tensors]
    together = [one.device.type != "cpu" and _is_plain(one) for one in plain]
    fresh = [torch.empty_like(one) if own else one.clone() for one, own in zip(plain, together, strict=True)]
    write(list(compress(fresh, together)), list(compress(plain, together)))
    return fresh


def write(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors of the same shapes, in place.

    Values that are not where the first of the tensors is are sent there by one copy. A GPU copies many tensors by few
    launches where they are of one type.

    Args:
        into: The tensors, which must not need gradients.
        values: What they are to hold.
    """
    groups = dict[object, tuple[list[Tensor], list[Tensor]]]()
    for own, value in zip(into, moved(values, into[0].device) if into else (), strict=True):
        owns, others = groups.setdefault((own.device, own.dtype, value.dtype), ([], []))
        owns.append(own)
        others.append(value)
    for owns, others in groups.values():
        torch._foreach_copy_(owns, others)


def magnitudes(tensors: Sequence[Tensor]) -> list[float]:
    """Largest absolute value of each dense tensor; NaN if there is one, and 0 without any number.

    All are read before the one wait for a device.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.tensor_lists import magnitudes
        >>> magnitudes([torch.tensor([1.0, -3.0]), torch.tensor([float("nan"), 1.0]), torch.ones(0), torch.tensor(-7)])
        [3.0, nan, 0.0, 7.0]
    """
    found, waiting = [0.0] * len(tensors), dict[torch.dtype, list[tuple[int, Tensor]]]()
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
            if real.dtype not in COMPARED or float64_device(real.device) != real.device:  # such as float8
                real = real.cpu().double()
            if real.device.type == "cpu":
                smallest, largest = torch.stack(real.aminmax()).tolist()  # one pass
                found[place] = float(max(largest, -smallest))
            else:
                waiting.setdefault(real.dtype, []).append((place, real))
    for dtype, group in waiting.items():
        if not dtype.is_floating_point:  # torch has no such norm of integers
            whole = torch.cat([real.reshape(-1) for _, real in group]).double()
            parts = whole.split([real.numel() for _, real in group])
            group[:] = [(place, part) for (place, _), part in zip(group, parts, strict=True)]
    norms = [norm for group in waiting.values() for norm in torch._foreach_norm([real for _, real in group], math.inf)]
    places = [place for group in waiting.values() for place, _ in group]
    for place, size in zip(places, torch.stack(norms).tolist() if norms else (), strict=True):
        found[place] = size
    return found


def all_within(tensors: Sequence[Tensor], bound: float) -> bool:
    """Whether no number of dense tensors is NaN or has an absolute value above a bound.

    On a GPU all tensors of a type are looked at in one piece, whose magnitude is rounded as the bound is.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional.tensor_lists import all_within
        >>> tensors = [torch.tensor([1.0, -3.0]), torch.tensor(2)]
        >>> all_within(tensors, 3.0), all_within(tensors, 2.5), all_within([torch.tensor(float("nan"))], 3.0)
        (True, False, False)
    """
    groups = dict[object, list[Tensor]]()
    for tensor in tensors:
        alone = tensor.device.type == "cpu" or tensor.dtype not in COMPARED
        groups.setdefault(id(tensor) if alone else tensor.dtype, []).append(tensor.detach())
    pieces = [one[0] if len(one) == 1 else torch.cat([part.reshape(-1) for part in one]) for one in groups.values()]
    return all(size <= bound for size in magnitudes(pieces))
