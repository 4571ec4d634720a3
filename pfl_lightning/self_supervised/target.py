"""Target networks, which follow others by a moving average and are held as buffers."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_between
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.state.closures import copy_module


class TargetNetwork(nn.Module):
    """Copy of a chain of networks (an encoder and a projector) that follows them by a moving average.

    Its tensors are buffers: no phase of a local fit can train them, every engine knows that a step may change them,
    and without ``keep`` they are not part of the client's state. The copy computes its own running statistics of batch
    normalization.

    Args:
        networks: The networks to follow, in the order of the forward pass.
        momentum: m of the moving average, target = m target + (1 - m) online, in [0, 1].
        keep: Whether the copy is personal state, with which a client's next fit continues; otherwise every fit starts
            from a new copy.

    Raises:
        ValueError: The momentum is not in [0, 1].

    Example:
        >>> import torch
        >>> from pfl_lightning.self_supervised import TargetNetwork
        >>> online = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(online.weight, 1.0)
        >>> target = TargetNetwork(online, momentum=0.75)
        >>> _ = torch.nn.init.constant_(online.weight, 5.0)
        >>> target.follow(online)
        >>> target(torch.ones(1, 1)).item()  # 0.75 * 1 + 0.25 * 5
        2.0
    """

    started: Tensor

    def __init__(self, *networks: nn.Module, momentum: float, keep: bool = False) -> None:
        super().__init__()
        check_between("momentum", momentum, 0, 1)
        self.momentum, self.keep = momentum, keep
        self.copies = nn.ModuleList(
            parameters_to_buffers(copy_module(network), persistent=keep) for network in networks
        )
        self.register_buffer("started", torch.zeros((), dtype=torch.int64), persistent=keep)

    @torch.no_grad()
    def start(self, *networks: nn.Module) -> None:
        """Start a fit with a copy of the networks, unless the client has kept a target from an earlier fit."""
        if self.keep and int(self.started):
            return
        self.started.fill_(1)
        for network, own in zip(networks, self.copies, strict=True):
            buffers = dict(own.named_buffers())
            for name, tensor in (*network.named_parameters(), *network.named_buffers()):
                buffers[name].copy_(tensor)

    def forget(self) -> None:
        """Discard the target, so that the next fit starts from a copy of the networks."""
        self.started.zero_()

    @torch.no_grad()
    def follow(self, *networks: nn.Module) -> None:
        """Take a step towards the networks' parameters.

        Equals ``lightly.models.utils.update_momentum``, but goes tensor by tensor, since ``torch.func.vmap`` has no
        rule for the fused kernels that it calls.
        """
        for network, own in zip(networks, self.copies, strict=True):
            targets = dict(own.named_buffers())
            for name, online in network.named_parameters():
                targets[name].mul_(self.momentum).add_(online, alpha=1.0 - self.momentum)

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Output of the chain, without gradient."""
        for network in self.copies:
            inputs = network(inputs)
        return inputs


def parameters_to_buffers(network: nn.Module, *, persistent: bool) -> nn.Module:
    """Turn all parameters of a network into buffers, in place.

    Args:
        network: The network; tied parameters stay tied.
        persistent: Whether its tensors are part of ``state_dict``. Buffers that were not stay out in any case (masks,
            say, which may hold infinities).

    Raises:
        ConfigurationError: The network has recurrent layers, which hold their parameters in a list as well.

    Example:
        >>> import torch
        >>> from pfl_lightning.self_supervised.target import parameters_to_buffers
        >>> network = parameters_to_buffers(torch.nn.Linear(2, 1), persistent=False)
        >>> len(list(network.parameters())), [name for name, _ in network.named_buffers()], list(network.state_dict())
        (0, ['weight', 'bias'], [])
    """
    made: dict[int, Tensor] = {}
    for module in network.modules():
        if isinstance(module, nn.RNNBase):
            raise ConfigurationError(
                f"the encoder has the recurrent layer {type(module).__name__}, which cannot be copied into a target "
                "network; use an encoder without recurrent layers, or an objective without a target network (SimCLR, "
                "SimSiam, SwAV)"
            )
        stays_out = set(module._non_persistent_buffers_set)
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                tensor = made.setdefault(id(parameter), parameter.detach().clone())
                del module._parameters[name]
                module.register_buffer(name, tensor, persistent=persistent)
        for name, buffer in list(module._buffers.items()):
            module.register_buffer(name, cast(Tensor, buffer), persistent=persistent and name not in stays_out)
    return network
