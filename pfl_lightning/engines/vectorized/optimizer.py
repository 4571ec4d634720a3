"""Optimizers over the stacked parameters of many clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pfl_lightning.client import FederatedClient, Phase
from pfl_lightning.engines.schedules import advance, unpack_optimizers
from pfl_lightning.engines.vectorized.limits import CannotVectorizeError, is_elementwise
from pfl_lightning.engines.vectorized.stack import Stack, in_state

Tensors = Mapping[str, Tensor]


@dataclass(eq=False)
class _Configured:
    """What ``configure_optimizers`` of a client has returned.

    Attributes:
        optimizer: The optimizer, over the client's own parameters until it is bound.
        schedulers: Its schedulers.
        names: Names of the parameters, by group.
    """

    optimizer: Optimizer
    schedulers: list[Any]
    names: list[list[str]]

    @staticmethod
    def of(client: FederatedClient) -> _Configured:
        optimizer, schedulers = unpack_optimizers(client.configure_optimizers())
        return _Configured(optimizer, schedulers, _names_of(optimizer, client))

    @property
    def settings(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def bind(self, tensors: Tensors) -> None:
        """Put tensors in the place of the parameters, with the state that the optimizer has for these."""
        state = self.optimizer.state
        for group, names in zip(self.optimizer.param_groups, self.names, strict=True):
            before, group["params"] = group["params"], [tensors[name].detach() for name in names]
            for old, new in zip(before, group["params"], strict=True):
                if old in state:
                    state[new] = {key: _fitted(key, value, old, new) for key, value in state.pop(old).items()}

    def step(self, gradients: Tensors) -> None:
        for group, names in zip(self.optimizer.param_groups, self.names, strict=True):
            for parameter, name in zip(group["params"], names, strict=True):
                parameter.grad = gradients.get(name)
        self.optimizer.step()

    def advance(self, interval: str) -> None:
        for entry in self.schedulers:
            if entry.interval == interval:
                entry.scheduler.step()


class StackedOptimizer:
    """The optimizers that clients configure, over stacked parameters (K, ...).

    A client configures its optimizer over its own parameters; then stacked ones take their places in its groups, so
    that a choice by a parameter's name or shape stays valid. One optimizer steps all clients; where they have
    schedules, or settings of their own, or the optimizer is not elementwise, each has one over its rows: learning rates
    may differ at any step, as a client with fewer batches begins its next epoch earlier.

    Args:
        client: The module, in the current phase; afterwards it holds the state of one of the clients.
        phase: The phase.
        stack: The clients.
        steps: Number of steps of each of the K clients.

    Attributes:
        names: Names of the parameters.

    Raises:
        ConfigurationError: A schedule cannot continue from earlier fits.
        CannotVectorizeError: It holds a parameter that is not the client's.
    """

    def __init__(self, client: FederatedClient, phase: Phase, stack: Stack, steps: Sequence[int]) -> None:
        self._optimizers = [_Configured.of(client)]
        asked = type(client).configure_optimizers is not FederatedClient.configure_optimizers
        apart = bool(self._optimizers[0].schedulers) or not is_elementwise(self._optimizers[0].optimizer)
        if asked or apart:
            self._optimizers.clear()
            for member in stack.members:
                with in_state(client, stack.row(member)):  # which it may read
                    self._optimizers.append(_Configured.of(client))
        first = self._optimizers[0]
        if not apart and all(own.settings == first.settings for own in self._optimizers):
            self._optimizers = [first]
        for own, member, count in zip(self._optimizers, stack.members, steps, strict=False):
            for entry in own.schedulers:
                often = count if entry.interval == "step" else phase.epochs
                advance(entry.scheduler, client, phase, member.context, often)
        self.names = [name for group in first.names for name in group]
        self._by_row = len(self._optimizers) > 1

    def bind(self, parameters: Tensors) -> None:
        """Continue with these parameters (A, ...), which are changed in place: those of the first A clients."""
        del self._optimizers[len(next(iter(parameters.values()))) :]
        for row, own in enumerate(self._optimizers):
            own.bind({name: value[row] for name, value in parameters.items()} if self._by_row else parameters)

    @torch.no_grad()
    def step(self, gradients: Tensors) -> None:
        """One step of every client, and of the schedules that advance every step.

        Args:
            gradients: By name, (A, ...); a parameter without gradient stays as it is.
        """
        for row, own in enumerate(self._optimizers):
            own.step({name: value[row] for name, value in gradients.items()} if self._by_row else gradients)
            own.advance("step")

    def after_epoch(self, row: int) -> None:
        """Advance the schedules of the client in this row that advance every epoch."""
        if self._optimizers[0].schedulers:
            self._optimizers[row if self._by_row else 0].advance("epoch")


def _fitted(key: str, value: Any, old: Tensor, new: Tensor) -> Any:
    """A value of an optimizer's state for another tensor: for all clients at first, and then for those that go on."""
    if key == "step" or not isinstance(value, Tensor) or value.shape != old.shape:
        return value
    return value.expand_as(new).clone() if value.ndim < new.ndim else value[: len(new)] if new.ndim else value


def _names_of(optimizer: Optimizer, client: FederatedClient) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in client.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CannotVectorizeError(
                    f"the optimizer of {type(client).__name__} holds a tensor of shape {tuple(parameter.shape)} "
                    "that is not a parameter of the client"
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
