"""The server's side of a method: updates in, broadcasts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfl_lightning.client import FederatedClient
from pfl_lightning.facts import RunFacts
from pfl_lightning.functional import RunningAverage
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.seeding import seeded_generator
from pfl_lightning.state.client_states import ClientStates
from pfl_lightning.state.tensors import TensorDict, select_state

__all__ = ["AggregationWeights", "Aggregator", "AveragingAggregator"]


@dataclass(frozen=True)
class AggregationWeights:
    """How an aggregation made something of its own for each client of the cohort out of what all of them sent.

    Attributes:
        clients: The cohort, in the order of the rows, m numbers.
        weights: Row i says how much client ``clients[i]`` gets of each client's, (m, m), on the CPU.
    """

    clients: tuple[int, ...]
    weights: Tensor


class Aggregator(nn.Module):
    """Base of every method's server.

    Within a round, :meth:`receive` is called once for each update, in the order of the cohort, and then
    :meth:`aggregate` once. What :meth:`broadcast` gives must not depend on what was received since the last
    :meth:`aggregate`, and tensors that it has given must not change before: an engine may have sent clients out already
    when the first updates come. An aggregator that needs no more than sums keeps sums, so that its memory does not
    grow with the cohort. Its buffers are its state: they are saved in checkpoints and move to the device.

    Args:
        client: The client as it is before the first round; its state is the server's first state.
        num_clients: Number of clients, m.
    """

    def __init__(self, client: FederatedClient, num_clients: int) -> None:
        super().__init__()
        self.num_clients = num_clients
        self.aggregation_weights: AggregationWeights | None = None
        """Weights of the last aggregation, for looking at; ``None`` before it, and where clients get no mixture."""
        self.seed = 0
        """The run's seed, set by the federation; see :meth:`generator`."""
        self.facts = RunFacts(num_clients)
        """Facts about the run, set by the federation: number of participating clients and planned number of rounds."""

    def generator(self, purpose: str, round: int) -> torch.Generator:
        """Return a CPU generator seeded by (seed, purpose, round), which draws the same after a resume.

        Args:
            purpose: Name of what is drawn, such as ``"virtual features"``; different purposes draw independently.
            round: Number of the round, from 0.
        """
        return seeded_generator(self.seed, purpose, round)

    def broadcast(self, client: int, round: int) -> Broadcast:
        """What the client receives at the start of the round (and before it is evaluated)."""
        raise NotImplementedError

    def check(self, update: ClientUpdate) -> None:
        """Refuse an update that cannot be aggregated; called once for each update, before :meth:`receive`.

        Raises:
            InvalidMessageError: Names the client, the round and the field.
        """
        update.check_finite()

    def receive(self, update: ClientUpdate) -> None:
        """Take one client's update.

        Raises:
            InvalidMessageError: The update is non-finite or misshapen; the server's state is as before.
        """
        raise NotImplementedError

    def aggregate(self) -> None:
        """Combine what was received since the last call; without any update nothing changes."""
        raise NotImplementedError

    def has_client_weights(self) -> bool:
        """Whether aggregations leave a ``aggregation_weights``: each client gets a combination of its own."""
        return False

    def client_states(self) -> Sequence[ClientStates]:
        """What the server keeps for every client, if anything; the federation says whether it rests on disk."""
        return ()


class AveragingAggregator(Aggregator):
    """Mean of the clients' shared state, weighted by their numbers of samples (FedAvg, McMahan et al. 2017, Alg. 1).

    With nothing shared it receives empty updates and changes nothing.

    Args:
        client: See :class:`Aggregator`.
        num_clients: Number of clients, m.
        by_samples: Whether a client counts by its number of samples; otherwise all count the same.
    """

    def __init__(self, client: FederatedClient, num_clients: int, by_samples: bool = True) -> None:
        super().__init__(client, num_clients)
        self.by_samples = by_samples
        self.weights = TensorDict(select_state(client, client.shared_names()))
        self._average = RunningAverage()

    def broadcast(self, client: int, round: int) -> Broadcast:
        """The global state, the same for every client."""
        return Broadcast(client=client, round=round, weights=self.weights.as_state())

    def receive(self, update: ClientUpdate) -> None:
        """Add one client's state to the running average."""
        update.check_like("weights", update.weights, self.weights.as_state())
        update.check_finite()
        update.check_size()
        if update.weights:
            self._average.update(update.weights, update.num_samples if self.by_samples else 1)

    def aggregate(self) -> None:
        """Take the mean, w = sum_k n_k / n w_k."""
        average, self._average = self._average, RunningAverage()
        if average.total_weight > 0:
            self.weights.assign(average.result())
