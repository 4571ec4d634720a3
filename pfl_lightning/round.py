"""One communication round, in the order of Algorithm 1 of FedAvg (McMahan et al., 2017)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData
from pfl_lightning.engines import FitEnvironment, FitResult, FitTask
from pfl_lightning.engines.lifecycle import make_context
from pfl_lightning.errors import FederationError
from pfl_lightning.messages import Message
from pfl_lightning.server import CHECKED_ROUNDS, Aggregator
from pfl_lightning.state.clients import Clients

__all__ = ["Round", "Traffic"]


class Traffic:
    """Bytes sent up (clients to server) and down (server to clients), by kind of content."""

    def __init__(self) -> None:
        self.up: dict[str, int] = {}
        self.down: dict[str, int] = {}

    def count(self, direction: dict[str, int], message: Message) -> None:
        """Add a message to one direction."""
        for kind, size in message.bytes_by_kind().items():
            direction[kind] = direction.get(kind, 0) + size


@dataclass
class Round:
    """One communication round: broadcasts, local fits, uploads, aggregation.

    The engine takes a client when it has room for one, so that it may run ahead of :meth:`fit_next`. Broadcasts
    therefore depend on nothing that the server receives in the same round (see
    :class:`~pfl_lightning.server.Aggregator`).

    Attributes:
        number: Number of the round, from 0.
        cohort: Clients of the round, in the order in which they are fitted.
        clients: Modules and stored states of all clients.
        server: Server of the federation.
        data: Data of all clients.
        environment: Seed, device and precision.
        traffic: Counts every broadcast and every upload.
        fits: Results of the engine, which takes its tasks from :meth:`broadcasts`.
        results: Losses, times and errors of the clients so far, without updates and personal states.
    """

    number: int
    cohort: Sequence[int]
    clients: Clients
    server: Aggregator
    data: FederatedData
    environment: FitEnvironment
    traffic: Traffic
    results: list[FitResult] = field(default_factory=list)
    fits: Iterator[FitResult] = field(init=False, repr=False)

    def broadcasts(self) -> Iterator[tuple[FederatedClient, FitTask]]:
        """Send each client what the server has for it, when its turn comes."""
        for client in self.cohort:
            broadcast = self.server.broadcast(client, self.number)
            self.traffic.count(self.traffic.down, broadcast)
            model = self.clients.model_of(client)
            context = make_context(self.data, client, self.number, model, self.environment, training=True)
            yield model, FitTask(context, broadcast, self.clients.stored(client))

    def fit_next(self, client: int) -> FitResult:
        """Fit the next client of the cohort and pass its update on to the server.

        Args:
            client: The client that the outer Trainer expects.

        Returns:
            Losses, time and error of the fit. The tensors are left out, so that their memory is free.

        Raises:
            FederationError: Another client is next, or the cohort is at its end.
        """
        result = next(self.fits, None)
        if result is None or result.client != client:
            found = "the cohort is at its end" if result is None else f"client {result.client} is next in the cohort"
            raise FederationError(
                f"round {self.number}: the outer Trainer asks for client {client}, and {found}; leave the order of the "
                "data module's loaders as it is"
            )
        error = self._collect(result)
        if error is not None:
            warnings.warn(f"left out of the aggregation: {error}", stacklevel=2)
        self.results.append(replace(result, update=None, personal={}, error=error))
        return self.results[-1]

    def _collect(self, result: FitResult) -> FederationError | None:
        """Take over a client's update and its personal state.

        The personal state was read after ``make_update``, which may still change it. A refused update leaves the
        client as it was before the round, so the state is stored only after the server has taken the update.

        Returns:
            Why the client is left out of the aggregation; ``None`` when it is not.
        """
        if result.update is None:
            return result.error
        self.traffic.count(self.traffic.up, result.update)
        try:
            self.server.check(result.update)
            self.server.receive(result.update)
        except FederationError as refused:
            return refused
        self.clients.personal.set(result.client, result.personal)
        return None

    def close(self, min_clients: int = 1) -> None:
        """Let the server aggregate.

        Args:
            min_clients: Least number of updates to aggregate.

        Raises:
            FederationError: The round has fewer updates; it names the errors of the clients.
        """
        errors = [str(result.error) for result in self.results if result.error is not None]
        count = len(self.results) - len(errors)
        if count < min_clients:
            more = f"; and {len(errors) - 3} more" if len(errors) > 3 else ""
            raise FederationError(
                f"round {self.number}: {count} of {len(self.results)} updates can be aggregated, min_clients is "
                f"{min_clients}. {'; '.join(errors[:3])}{more}"
            )
        self.server.aggregate()
        if self.number < CHECKED_ROUNDS:
            self.server.check_unsaved()

    def metrics(self) -> dict[str, float]:
        """Training metrics of the round, by the name under which they are logged.

        Loss terms are means over clients. Values that the clients' modules logged themselves are weighted by the
        clients' numbers of samples: means over samples so become means over all samples of the round.
        """
        good = [result for result in self.results if result.error is None]
        found = {}
        for name in sorted({name for result in good for name in result.losses}):
            found[f"train/{name}"] = float(np.mean([r.losses[name] for r in good if name in r.losses]))
        for name in sorted({name for result in good for name in result.logged}):
            own = [result for result in good if name in result.logged]
            found[name] = float(np.average([r.logged[name] for r in own], weights=[r.num_samples for r in own]))
        found["train/clients_left_out"] = float(len(self.results) - len(good))
        return found
