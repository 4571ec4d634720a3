"""Networks that follow others by a moving average, as buffers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_number
from pfl_lightning.errors import ConfigurationError

__all__ = ["TargetNetwork", "parameters_to_buffers"]


class TargetNetwork(nn.Module):
    """A copy of a chain of networks (an encoder and a projector) that follows them by a moving average.

    Its tensors are buffers: no phase of a local fit can train them, every engine knows that a step may change them,
    and without ``keep`` they are no part of the client's state. Running statistics of batch normalization are the
    copy's own, from what it sees.

    Args:
        networks: What is followed, in the order in which a sample goes through.
        momentum: m of the moving average, target = m target + (1 - m) online.
        keep: Whether the copy is personal state, so that a client's next fit goes on from it; otherwise every fit
            starts from a new copy.
    """

    started: Tensor

    def __init__(self, *networks: nn.Module, momentum: float, keep: bool = False) -> None:
        super().__init__()
        check_number("momentum", momentum)
        if momentum > 1:
            raise ValueError(f"momentum must be at most 1, got {momentum}")
        self.momentum, self.keep = momentum, keep
        self.copies = nn.ModuleList(
            parameters_to_buffers(copy.deepcopy(network), persistent=keep) for network in networks
        )
        self.register_buffer("started", torch.zeros((), dtype=torch.int64), persistent=keep)

    @torch.no_grad()
    def start(self, *networks: nn.Module) -> None:
        """Start a fit: from a copy of the networks, unless the client has kept a target from an earlier fit."""
        if self.keep and int(self.started):
            return
        self.started.fill_(1)
        for network, own in zip(networks, self.copies, strict=True):
            buffers = dict(own.named_buffers())
            for name, tensor in (*network.named_parameters(), *network.named_buffers()):
                buffers[name].copy_(tensor)

    def forget(self) -> None:
        """Let the next fit start from a copy of the networks."""
        self.started.zero_()

    @torch.no_grad()
    def follow(self, *networks: nn.Module) -> None:
        """Take a step towards the networks' parameters.

        As ``lightly.models.utils.update_momentum``, tensor by tensor, since ``torch.func.vmap`` has no rule for the
        fused kernels that it calls.
        """
        for online, target in self._pairs(networks):
            target.mul_(self.momentum).add_(online, alpha=1.0 - self.momentum)

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """The output of the chain, without gradient."""
        for network in self.copies:
            inputs = network(inputs)
        return inputs

    def _pairs(self, networks: tuple[nn.Module, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        for network, own in zip(networks, self.copies, strict=True):
            buffers = dict(own.named_buffers())
            for name, parameter in network.named_parameters():
                yield parameter, buffers[name]


def parameters_to_buffers(network: nn.Module, *, persistent: bool) -> nn.Module:
    """Turn all parameters of a network into buffers, in place.

    Args:
        network: The network; tied parameters stay tied.
        persistent: Whether its tensors, those that were buffers before included, are part of ``state_dict``.

    Raises:
        ConfigurationError: It has recurrent layers, which hold their parameters in a list as well.
    """
    made: dict[int, Tensor] = {}
    for module in network.modules():
        if isinstance(module, nn.RNNBase):
            raise ConfigurationError(
                f"the encoder has the recurrent layer {type(module).__name__}, of which no target network can be made; "
                "use an encoder without recurrent layers, or an objective without a target network (SimCLR, SimSiam, "
                "SwAV)"
            )
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                tensor = made.setdefault(id(parameter), parameter.detach().clone())
                del module._parameters[name]
                module.register_buffer(name, tensor, persistent=persistent)
        for name, buffer in list(module._buffers.items()):
            module.register_buffer(name, cast(Tensor, buffer), persistent=persistent)
    return network
