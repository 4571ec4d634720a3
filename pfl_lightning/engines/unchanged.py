"""What is frozen stays as it is: a cheap check that a local fit has not changed it."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

import torch
from torch import Tensor, nn

from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.errors import ConfigurationError

__all__ = ["check_unchanged", "sampled"]

SAMPLES = 8
"""Values of each tensor that are looked at: a step of an optimizer, or a moving average, changes nearly all."""

Samples = dict[torch.dtype, tuple[tuple[str, ...], tuple[int, ...], Tensor]]


@torch.no_grad()
def sampled(module: nn.Module, names: Collection[str]) -> Samples:
    """A few values of each tensor, spread evenly over it, one after the other.

    Args:
        module: The module.
        names: Names of parameters or buffers.

    Returns:
        Names, how many bytes each has, and the bytes, by type.
    """
    found: dict[torch.dtype, dict[str, Tensor]] = {}
    for tensors in (module.named_parameters(), module.named_buffers()):
        for name, tensor in tensors:
            if name in names and tensor.numel():
                found.setdefault(tensor.dtype, {})[name] = _few(tensor)
    return {
        dtype: (
            tuple(own),
            tuple(value.nbytes for value in own.values()),
            torch.cat(list(own.values())).view(torch.uint8).cpu(),
        )
        for dtype, own in found.items()
    }


def _few(tensor: Tensor) -> Tensor:
    count = min(SAMPLES, tensor.numel())
    if tensor.is_contiguous():
        return tensor.detach().as_strided((count,), (tensor.numel() // count,))
    return tensor.detach()[0].flatten()[:count]


def check_unchanged(client: FederatedClient, context: FitContext) -> None:
    """Compare what is frozen with the samples that were taken when the fit began.

    Raises:
        ConfigurationError: It has changed: one client's values would be the next one's.
    """
    before, client.frozen_before = client.frozen_before, {}
    name = _first_change(before, sampled(client, client.frozen))
    if name is not None:
        raise ConfigurationError(
            f"the local fit of client {context.client} in round {context.round + 1} changed {name}, which was frozen "
            "(requires_grad=False) when the federation was set up and is one for all clients. Make the module once "
            "more and let it train from the start, or let frozen parameters travel like others: "
            "federate(..., frozen=())"
        )


def _first_change(before: Samples, now: Samples) -> str | None:
    for dtype, (names, counts, values) in before.items():
        if dtype not in now or now[dtype][:2] != (names, counts):
            return names[0]
        different = (now[dtype][2] != values).nonzero()
        if len(different):
            return next(name for name, end in zip(names, accumulate(counts), strict=True) if int(different[0]) < end)
    return None
