"""Federated learning in plain torch, without the package's clients, servers and engines: what the methods are held to.

Only the seeds are the package's: they are part of its contract (a batch order belongs to a seed, a phase, a round and a
client), and without them there would be nothing to compare.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _helpers.toy import BATCH, CLASSES, FEATURES, INPUTS, SEED, Toy, tiny_encoder
from pfl_lightning.seeding import derive_seed

Loss = Callable[["Net", Tensor, Tensor], Tensor]
State = dict[str, Tensor]


class Net(nn.Module):
    """Encoder and head."""

    def __init__(self, make_encoder: Callable[[Sequence[int]], nn.Module] = tiny_encoder) -> None:
        super().__init__()
        self.encoder = make_encoder((INPUTS,))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(inputs))
        return scores


def first_net(seed: int = SEED) -> Net:
    """Initial weights of all clients."""
    torch.manual_seed(derive_seed(seed, "initial weights"))
    return Net()


def batches(data: Toy, client: int, round: int, purpose: str, epochs: int, seed: int = SEED) -> Iterator[list[Tensor]]:
    """The batches of one phase: a permutation for each epoch, cut into runs; the last run may be shorter."""
    inputs, labels = data.tensors(client)
    generator = torch.Generator().manual_seed(derive_seed(seed, purpose, round, client))
    for _ in range(epochs):
        order = torch.randperm(len(labels), generator=generator).tolist()
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            yield [torch.stack([inputs[i] for i in chosen]), torch.stack([labels[i] for i in chosen])]


def cross_entropy(net: Net, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(inputs), labels)


def sgd(
    net: Net,
    steps: Iterator[list[Tensor]],
    train: Sequence[nn.Parameter],
    lr: float,
    loss: Loss = cross_entropy,
    momentum: float = 0.5,
    weight_decay: float = 5e-4,
) -> None:
    """SGD with momentum and weight decay, written out."""
    velocity = [torch.zeros_like(p) for p in train]
    for inputs, labels in steps:
        gradients = torch.autograd.grad(loss(net, inputs, labels), train)
        with torch.no_grad():
            for p, g, v in zip(train, gradients, velocity, strict=True):
                v.mul_(momentum).add_(g + weight_decay * p)
                p.sub_(lr * v)


def mean_of(states: Sequence[State], sizes: Sequence[int]) -> State:
    """The mean weighted by sizes, in double precision."""
    total = sum(sizes)
    return {
        name: sum(state[name].double() * (n / total) for state, n in zip(states, sizes, strict=True)).to(tensor.dtype)
        for name, tensor in states[0].items()
    }


def named(net: nn.Module, prefix: str = "") -> State:
    """A copy of the parameters whose names begin with the prefix."""
    return {n: p.detach().clone() for n, p in net.named_parameters() if n.startswith(prefix)}


def put(net: nn.Module, state: State) -> None:
    """Set parameters."""
    own = dict(net.named_parameters())
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(value)


def copy_of(net: Net) -> Net:
    return copy.deepcopy(net)


def score(net: Net, data: Toy, client: int, part: str) -> tuple[float, float]:
    """Accuracy and mean cross entropy."""
    inputs, labels = data.tensors(client, part)
    with torch.no_grad():
        scores = net(inputs)
        return float((scores.argmax(1) == labels).float().mean()), float(F.cross_entropy(scores, labels))


class RoundsAsEpochs:
    """The batches of a client in the order of the rounds, for a Trainer that knows nothing of a federation."""

    def __init__(self, toy: Toy, client: int, rounds: int, epochs: int = 1) -> None:
        self.number = -(-len(toy.labels[client]) // BATCH)
        self.steps = itertools.chain(*(batches(toy, client, round, "fit/0", epochs) for round in range(rounds)))

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[list[Tensor]]:
        return itertools.islice(self.steps, self.number)
