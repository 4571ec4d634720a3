"""A round of FedEMA (Zhuang et al., ICLR 2022) in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import Loop, Setting, State, mean_of
from .self_supervised import OUT, byol_head

TAU, MOMENTUM = 0.7, 0.99
"""Of the autoscaler, and of the target network."""


@dataclass
class Client:
    """What a client keeps from round to round.

    Attributes:
        online: Encoder, projector and predictor.
        target: The encoder and the projector that follow them.
        last_round: Round of its last fit, -1 before the first.
        first_divergence: ||global - own|| at the start of its second fit, 0 before; lambda_k is tau divided by it.
    """

    online: nn.ModuleDict
    target: nn.ModuleDict
    last_round: int = -1
    first_divergence: float = 0.0


class FedEMA(Loop):
    """Online networks are averaged by numbers of samples; a client mixes them with its own."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        encoder = setting.make_encoder()
        width = int(encoder.out_features)
        parts = {"encoder": encoder, "projector": byol_head(width), "predictor": byol_head(OUT)}
        online = nn.ModuleDict(parts).to(setting.dtype)
        target = nn.ModuleDict({name: online[name] for name in ("encoder", "projector")})
        copies = [(copy.deepcopy(online), copy.deepcopy(target).requires_grad_(False)) for _ in setting.data]
        self.own = [Client(*networks) for networks in copies]

    def load(self, server: State, clients: Sequence[State]) -> None:
        """Start from the global networks and from what clients keep."""
        super().load(server, clients)
        for own, state in zip(self.own, clients, strict=True):
            own.online.load_state_dict(part_of(state, "own."), strict=False)  # without running statistics
            own.target.load_state_dict(part_of(state, "target."), strict=False)
            own.last_round, own.first_divergence = int(state["last_round"]), float(state["first_divergence"])

    def state(self) -> tuple[State, list[State]]:
        """The global networks, and what clients keep, of which the heads are as they were."""
        states = []
        for own, before in zip(self.own, self.clients, strict=True):
            online = {"own." + name: parameter for name, parameter in own.online.named_parameters()}
            target = {"target." + name: value for name, value in own.target.state_dict().items()}
            numbers = {
                "target.started": own.last_round >= 0,
                "last_round": own.last_round,
                "first_divergence": own.first_divergence,
            }
            states.append({**before, **online, **target, **{name: torch.tensor(one) for name, one in numbers.items()}})
        return self.server, states

    def round(self, number: int) -> None:
        """See :meth:`Loop.round`."""
        for client, own in enumerate(self.own):
            if own.last_round < 0:
                own.online.load_state_dict(self.server)
                own.target.load_state_dict({name: self.server[name] for name in own.target.state_dict()})
            else:
                self.mix(own)
            self.fit(client, number)
            own.last_round = number
        self.server = mean_of([own.online.state_dict() for own in self.own], [len(y) for _, y in self.setting.data])

    @torch.no_grad()
    def mix(self, own: Client) -> None:
        """Mix a client's parameters with the global ones, mu own + (1 - mu) global, and take the global statistics."""
        encoder = own.online["encoder"].named_parameters()
        squares = [(self.server["encoder." + name] - parameter).square().sum() for name, parameter in encoder]
        divergence = float(torch.stack(squares).sum().sqrt())
        own.first_divergence = own.first_divergence or divergence
        mu = min(TAU * divergence / own.first_divergence, 1.0)  # min(lambda_k ||global - own||, 1)
        for name, parameter in own.online.named_parameters():
            parameter.mul_(mu).add_(self.server[name], alpha=1 - mu)
        for name, statistic in own.online.named_buffers():
            statistic.copy_(self.server[name])

    def fit(self, client: int, round: int) -> None:
        """Train a client's networks by BYOL on two views of its images; nothing is augmented here."""
        own, (inputs, _) = self.own[client], self.setting.data[client]
        pairs = [(value, own.online.get_parameter(name)) for name, value in own.target.named_parameters()]
        optimizer = torch.optim.SGD(own.online.parameters(), **self.setting.sgd)
        for batch in self.setting.batches(client, round):
            first, second = inputs[batch], inputs[batch]
            with torch.no_grad():
                for followed, parameter in pairs:
                    followed.mul_(MOMENTUM).add_(parameter, alpha=1 - MOMENTUM)
                aims = [own.target["projector"](own.target["encoder"](view)) for view in (second, first)]
            guesses = [through(own.online, view) for view in (first, second)]
            cosines = [F.cosine_similarity(guess, aim).mean() for guess, aim in zip(guesses, aims, strict=True)]
            loss = 4 - 2 * sum(cosines)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def through(networks: nn.ModuleDict, images: Tensor) -> Tensor:
    """Predictions (N, p) of the target's projections of the other view."""
    return networks["predictor"](networks["projector"](networks["encoder"](images)))


def part_of(state: State, prefix: str) -> State:
    """The entries whose names begin so, without the beginning."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
