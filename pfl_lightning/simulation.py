"""Rounds in simulated time: who takes part, whose updates come too late, and how long a round takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.devices import Fleet, Pace
from pfl_lightning.errors import ClientError
from pfl_lightning.fit.tasks import FitResult
from pfl_lightning.messages import Broadcast, ClientUpdate

ASKED = 10
"""Clients that are asked for each place of a round before it stays empty, so that a round costs no more than these."""

IDLE_SECONDS = 60.0
"""Simulated seconds of a round without a deadline in which nobody reports."""


class StragglerError(ClientError):
    """A client is not there, drops out, or is late; as this is to be expected, nobody is warned of it."""


@dataclass(frozen=True, eq=False)
class LateUpdate:
    """An update on its way, in a form that a checkpoint takes.

    Attributes:
        arrival: When it arrives, in simulated seconds of the run.
        update: Fields of the update on the CPU; its weights are what the fit has changed, w_k - w.
        personal: What the client keeps, stored when the server takes the update.
        resume_state: See :class:`~pfl_lightning.engines.FitResult`.
    """

    arrival: float
    update: dict[str, Any]
    personal: dict[str, Tensor]
    resume_state: bytes | None

    @classmethod
    def of(cls, result: FitResult, sent: Broadcast, arrival: float) -> LateUpdate:
        """The update of a fit, which answers a broadcast."""
        own = result.with_own_state()
        assert own.update is not None
        update, before = own.update.to(torch.device("cpu")), sent.to(torch.device("cpu")).weights
        change = {name: w - before[name] for name, w in update.weights.items() if w.is_floating_point()}
        kept = {name: value.cpu() for name, value in own.personal.items()}
        return cls(arrival, {**vars(update), "weights": change}, kept, result.resume_state)

    def result(self, kind: type[ClientUpdate], sent: Broadcast, discount: float) -> FitResult:
        """The result of a fit that it stands for when it arrives.

        Its weights are what the server sends now, and the change, discounted for each round since: w + d^t (w_k - w').

        Args:
            kind: Class of the update.
            sent: What the server sends the client now.
            discount: d.
        """
        share, weights = discount ** (sent.round - self.update["round"]), dict(sent.weights)
        for name, change in self.update["weights"].items():
            weights[name] = weights[name] + share * change.to(weights[name].device)
        device = next(iter(weights.values()), torch.empty(0)).device
        update = kind(**{**self.update, "round": sent.round, "weights": weights}).to(device)
        result = FitResult(sent.client, sent.round, update, self.personal, {}, 0.0)
        return replace(result, num_samples=update.num_samples, resume_state=self.resume_state)


class Simulation:
    """The simulated time of a run, and what becomes of the clients of its current round.

    Args:
        fleet: The clients' devices.
        deadline: See :class:`~pfl_lightning.callbacks.Stragglers`, as for the others.
        over_selection: Clients that are asked for each one that is wanted.
        late: ``"drop"``, ``"partial"`` or ``"next"``.
        discount: Of the change in a late update, for each round.

    Attributes:
        clock: Simulated seconds of the rounds that are over.
        pending: Updates on their way.
        left_out: Why clients take no part in the round, by client.
        overdue: Clients of the round whose updates come after the deadline, and are taken later.
        waits: Whether who is taken in the round is known only when all have reported.
    """

    def __init__(self, fleet: Fleet, deadline: float | None, over_selection: float, late: str, discount: float) -> None:
        self.fleet, self.deadline = fleet, math.inf if deadline is None else deadline
        self.over_selection, self.late, self.discount = over_selection, late, discount
        self.clock, self.pending, self._wanted = 0.0, list[LateUpdate](), 0

    def choose(self, round: int, sample: Sequence[int], clients: Sequence[int]) -> list[int]:
        """Those of a sample who are there, and further clients in the places of others; never empty.

        Args:
            round: Number of the round, from 0.
            sample: Clients that the loop has drawn.
            clients: All that may take part.
        """
        self.pending = [late for late in self.pending if late.update["round"] != round]  # of a try that was interrupted
        self._wanted = len(sample)
        most = min(len(clients), math.ceil(self.over_selection * len(sample) - 1e-9))
        generator = np.random.default_rng(self.fleet.seed_of_further(round))
        further = generator.choice(len(clients), min(len(clients), ASKED * most), replace=False).tolist()
        asked = dict.fromkeys([*sample, *(clients[place] for place in further)])
        found = islice((client for client in asked if self._is_there(client, round)), most)
        return list(found) or list(sample[:1])

    def _is_there(self, client: int, round: int) -> bool:
        busy = any(late.update["client"] == client for late in self.pending)
        return not busy and self.fleet.is_there(client, round, self.clock)

    def begin_round(self, round: int, cohort: Sequence[int]) -> None:
        """Find out who takes part in a round."""
        self._round, self._paces, self.left_out = round, dict[int, Pace](), dict[int, str]()
        self._reports, self.overdue = dict[int, float](), set[int]()  # seconds until the update is there
        self.waits = len(cohort) > self._wanted
        for client in cohort:
            self._paces[client] = self.fleet.pace(client, self.clock)
            if not self._is_there(client, round):
                self.left_out[client] = "it is not there"
            elif self.fleet.drops_out(client, round):
                self.left_out[client] = "it drops out of the round"
            elif self.max_steps(client) == 0:
                self.left_out[client] = "it has no time for a local step and its messages"

    def max_steps(self, client: int) -> float:
        """Local steps that a client has time for: a whole number, or infinity."""
        pace = self._paces[client]
        return pace.steps(pace.stays if self.late == "next" else min(pace.stays, self.deadline))

    def fault(self, result: FitResult) -> StragglerError | None:
        """Note when the update is there; why it never will be, where the client leaves or its time is over."""
        pace = self._paces[result.client]
        leaves = self.late == "next" or pace.stays < self.deadline
        if result.is_cut and (leaves or self.late == "drop"):
            reason = f"it leaves after {pace.stays:.6g} s" if leaves else f"the deadline is {self.deadline:.6g} s"
            return StragglerError(result.client, self._round, f"{reason}, before its local fit ends")
        self._reports[result.client] = pace.transfer_seconds + result.num_steps * pace.seconds_per_step
        if result.num_steps > pace.steps(self.deadline):
            self.overdue.add(result.client)
        return None

    def first(self) -> list[int]:
        """The clients whose updates the server waits for: the first that report, up to the number wanted."""
        in_time = self._reports.keys() - self.overdue
        return sorted(in_time, key=lambda client: (self._reports[client], client))[: self._wanted]

    def put_off(self, result: FitResult, sent: Broadcast) -> StragglerError:
        """Why an update that is not among the first is left out; under ``late="next"`` it is kept for a later round."""
        reason = "its update comes in a later round" if self.late == "next" else f"{self._wanted} others are faster"
        if self.late == "next":
            self.pending.append(LateUpdate.of(result, sent, self.clock + self._reports[result.client]))
        return StragglerError(result.client, self._round, reason)

    def end_round(self) -> list[LateUpdate]:
        """Let the time of the round pass: until the last update that is wanted, or the deadline if one is missing.

        Returns:
            The updates of earlier rounds that have come, and are pending no more.
        """
        first = self.first()
        seconds = max((self._reports[client] for client in first), default=IDLE_SECONDS)
        is_complete = len(first) == min(self._wanted, len(self._paces)) or self.deadline == math.inf
        self.clock += seconds if is_complete else self.deadline
        found = [late for late in self.pending if late.update["round"] < self._round and late.arrival <= self.clock]
        self.pending = [late for late in self.pending if late not in found]
        return found
