"""A copy of networks that does not train: a teacher, or a client's own model of before."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.self_supervised.target import parameters_to_buffers
from pfl_lightning.state.closures import copy_module


class FrozenCopy(nn.Module):
    """Copy of a chain of networks that does not train: all of it are buffers.

    Args:
        networks: The networks, in the order of the forward pass.
        persistent: Whether the copy is part of ``state_dict``, apart from the networks' own non-persistent buffers.

    Raises:
        ConfigurationError: A network has recurrent layers.
    """

    def __init__(self, *networks: nn.Module, persistent: bool) -> None:
        super().__init__()
        for layer in (layer for network in networks for layer in network.modules()):
            if isinstance(layer, nn.RNNBase):
                raise ConfigurationError(
                    f"the encoder has the recurrent layer {type(layer).__name__}, which cannot be copied and frozen "
                    "(for MOON, FedNTD, FedCP); use an encoder without recurrent layers, or FedProx, which keeps "
                    "weights close"
                )
        copies = (parameters_to_buffers(copy_module(network), persistent=persistent) for network in networks)
        self.networks = nn.ModuleList(copies)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, whatever the mode of the client."""
        return super().train(False)

    @torch.no_grad()
    def take_over(self, *networks: nn.Module) -> None:
        """Copy the current weights and buffers of the networks."""
        for network, own in zip(networks, self.networks, strict=True):
            buffers = dict(own.named_buffers())
            for name, tensor in (*network.named_parameters(), *network.named_buffers()):
                buffers[name].copy_(tensor)

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Output of the chain, without gradient."""
        for network in self.networks:
            inputs = network(inputs)
        return inputs
