"""What is frozen stays as it is: a cheap check that a local fit has not changed it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.errors import ConfigurationError

__all__ = ["check_unchanged", "sampled"]

SAMPLES = 32
"""Values of each tensor that are looked at: a step of an optimizer, or a moving average, changes nearly all."""


@torch.no_grad()
def sampled(module: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """A few values of each tensor, spread evenly over it, by the module's names.

    Args:
        module: The module.
        names: Names of parameters or buffers.
    """
    found = {}
    for tensors in (module.named_parameters(), module.named_buffers()):
        for name, tensor in tensors:
            if name in names and tensor.numel():
                flat = tensor.detach().flatten() if tensor.is_contiguous() else tensor.detach()[0].flatten()
                found[name] = flat[:: max(1, len(flat) // SAMPLES)].clone()
    return found


def check_unchanged(client: FederatedClient, context: FitContext) -> None:
    """Compare what is frozen with the samples that were taken when the fit began.

    Raises:
        ConfigurationError: It has changed: one client's values would be the next one's.
    """
    now = sampled(client, client.frozen_before)
    for name, before in client.frozen_before.items():
        if name not in now or not torch.equal(now[name].nan_to_num(), before.to(now[name].device).nan_to_num()):
            raise ConfigurationError(
                f"the local fit of client {context.client} in round {context.round} changed {name}, which was frozen "
                "(requires_grad=False) when the federation was set up and is one for all clients. Make the module once "
                "more and let it train from the start, or let frozen parameters travel like others: "
                "federate(..., frozen=())"
            )
    client.frozen_before = {}
