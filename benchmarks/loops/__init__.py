"""Rounds of methods as plain PyTorch loops, written from their papers: what the package's rounds are timed beside.

Nothing here is the package's but its encoders and the seeds of batch orders and draws, so that both do the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfl_lightning.seeding import seeded_generator

State = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """What clients train on, and how.

    Attributes:
        data: Images and labels of each client.
        classes: Number of classes.
        make_encoder: Makes an encoder with an attribute ``out_features``.
        epochs: Local epochs.
        batch: Samples in a batch.
        sgd: Rate, momentum and weight decay of the clients.
        seed: Seed of the run.
    """

    data: Sequence[tuple[Tensor, Tensor]]
    classes: int
    make_encoder: Callable[[], nn.Module]
    epochs: int
    batch: int
    sgd: dict[str, float]
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the models, which is that of the images."""
        return self.data[0][0].dtype

    def batches(self, client: int, round: int, phase: int = 0) -> Iterator[Tensor]:
        """Positions of the samples of each batch of a local fit."""
        generator = seeded_generator(self.seed, f"fit/{phase}", round, client)
        for _ in range(self.epochs):
            yield from torch.randperm(len(self.data[client][1]), generator=generator).split(self.batch)


class Loop:
    """Clients and server of a method.

    Attributes:
        server: What the server keeps from round to round.
        clients: What each client keeps.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.server: State = {}
        self.clients: list[State] = [{} for _ in setting.data]

    def load(self, server: State, clients: Sequence[State]) -> None:
        """Start from these states."""
        self.server, self.clients = dict(server), [dict(state) for state in clients]

    def state(self) -> tuple[State, list[State]]:
        """What server and clients keep now."""
        return self.server, self.clients

    def round(self, number: int) -> None:
        """Local fits of all clients, and what the server does with them."""
        raise NotImplementedError


def copied(module: nn.Module, *parts: str) -> State:
    """A copy of the state of some parts of a module."""
    return copy.deepcopy({name: value for name, value in module.state_dict().items() if name.startswith(parts)})


def mean_of(states: Sequence[State], weights: Sequence[float]) -> State:
    """The weighted mean of states; of batch counters, the first."""
    total = sum(weights)
    mean = {}
    for name, first in states[0].items():
        parts = [state[name] * (weight / total) for state, weight in zip(states, weights, strict=True)]
        mean[name] = torch.stack(parts).sum(dim=0) if first.is_floating_point() else first
    return mean
