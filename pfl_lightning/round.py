"""One communication round, in the order of Algorithm 1 of FedAvg (McMahan et al., 2017)."""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import NamedTuple

import numpy as np

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData, names_of
from pfl_lightning.engines import FitEnvironment, FitResult, FitTask
from pfl_lightning.engines.lifecycle import make_context
from pfl_lightning.errors import ClientCodeError, ClientError, ConfigurationError, FederationError, InvalidMessageError
from pfl_lightning.functional.tensor_lists import magnitudes
from pfl_lightning.messages import LARGEST, Broadcast, ClientUpdate, magnitude
from pfl_lightning.metrics import over_clients, reduction_of
from pfl_lightning.notices import named_clients, shown_before
from pfl_lightning.privacy.mechanism import PrivacyMechanism
from pfl_lightning.robust.rules import Entry, Robust
from pfl_lightning.server import CHECKED_ROUNDS, Aggregator, no_broadcast
from pfl_lightning.simulation import Simulation, StragglerError
from pfl_lightning.state.clients import Clients
from pfl_lightning.state.image import Growth, Snapshot
from pfl_lightning.state.update_norms import Norms, UpdateGuard

_log = logging.getLogger(__name__)

Forge = Callable[[list[FitResult], Mapping[int, Broadcast]], Iterable[FitResult]]
"""Gives the results that the server is to see, in the order of the engine's, from these and what clients were sent."""


class Traffic:
    """Bytes sent up (clients to server) and down (server to clients), by kind of content."""

    def __init__(self) -> None:
        self.up, self.down = Counter[str](), Counter[str]()


class _Waiting(NamedTuple):
    """An update that the server has checked and not yet received.

    Attributes:
        result: The client's result.
        sent: The broadcast that the update answers.
        norms: How far it lies from that.
        place: Place among the round's results.
    """

    result: FitResult
    sent: Broadcast
    norms: Norms
    place: int


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
        guard: Tells updates that lie far from all others. Where it knows too few, which is in a first round, up to two
            updates wait for the next one, or for the end of the cohort.
        robust: Bounds updates, replaces them, or leaves some out, before the server receives them; ``None`` for none.
        on_client_error: Whether an exception of a client's own code or data costs that client its round, ``"skip"``,
            or ends the run, ``"raise"``, as it does before a first good round.
        simulated: What a simulation says of who drops out and is late; ``None`` without one.
        fits: Results of the engine, which takes its tasks from :meth:`broadcasts`; set by
            :meth:`~pfl_lightning.federation.Federation.begin_round`, since the engine needs the round first.
        mechanism: Takes the updates in the place of the server, and gives it one that stands for all of them; ``None``
            without privacy.
        left_out: Clients whose updates ``robust`` has left out.
        results: Losses, times and errors of the clients so far, without updates and personal states.
    """

    number: int
    cohort: Sequence[int]
    clients: Clients
    server: Aggregator
    data: FederatedData
    environment: FitEnvironment
    traffic: Traffic
    guard: UpdateGuard
    on_client_error: str = "skip"
    robust: Robust | None = None
    mechanism: PrivacyMechanism | None = None
    simulated: Simulation | None = None
    left_out: list[int] = field(default_factory=list)
    results: list[FitResult] = field(default_factory=list)
    fits: Iterator[FitResult] = field(init=False, repr=False)
    _sent: dict[int, Broadcast] = field(default_factory=dict, init=False, repr=False)
    _waiting: list[_Waiting] = field(default_factory=list, init=False, repr=False)
    _before: Snapshot | None = field(default=None, init=False, repr=False)
    _last: Snapshot | None = field(default=None, init=False, repr=False)
    _lacking: str | None = field(default=None, init=False, repr=False)

    def broadcasts(self) -> Iterator[tuple[FederatedClient, FitTask]]:
        """Send each client what the server has for it, when its turn comes."""
        if self.number == 0 and self.clients.resume_states is not None:
            self.clients.resume_states.clear()  # a Trainer that starts at round 0 resumes no schedules
        for client in self.cohort:
            if self.simulated is not None and client in self.simulated.left_out:
                continue
            broadcast = self.server.broadcast(client, self.number)
            if not isinstance(broadcast, Broadcast):
                raise no_broadcast(self.server, broadcast)
            if not (self._sent or self.results):  # the first of the round
                broadcast.check_content(self.server.sizes, lambda name: bool(getattr(self.server, name)))
            self.traffic.down.update(broadcast.bytes_by_kind())
            self._sent[client] = broadcast
            model, state = self.clients.model_and_state(client)
            context = make_context(self.data, client, self.number, model, self.environment, training=True)
            if self.simulated is not None:
                context = replace(context, max_steps=self.simulated.max_steps(client))
            resume_state = None if self.clients.resume_states is None else self.clients.resume_states.get(client)
            yield model, FitTask(context, broadcast, state, resume_state)

    def let_forge(self, forge: Forge) -> None:
        """Let a function replace the updates of the cohort when all clients have fitted, before any is checked."""
        fits = self.fits

        def forged() -> Iterator[FitResult]:
            yield from forge([result.with_own_state() for result in fits], self._sent)

        self.fits = forged()

    def fit_next(self, client: int) -> FitResult:
        """Take the fit of the next client from the engine and pass its update on to the server.

        The engine may have fitted it before. The update is checked here, and may wait for others (see ``guard``); a
        client whose fit or update fails is left out, with a warning.

        Args:
            client: The client that the outer Trainer expects.

        Returns:
            Losses, time and error of the fit. The tensors are left out, so that their memory is free.

        Raises:
            FederationError: Another client is next, or the cohort is at its end.
        """
        simulated = self.simulated
        if simulated is not None and client in simulated.left_out:
            nothing = FitResult(client, self.number, None, {}, {}, 0.0)
            return self._accept(nothing, None, StragglerError(client, self.number, simulated.left_out[client]))
        result = next(self.fits, None)
        if result is None or result.client != client:
            found = "the cohort is at its end" if result is None else f"client {result.client} is next in the cohort"
            raise FederationError(
                f"round {self.number + 1}: the outer Trainer asks for client {client}, and {found}; do not change the "
                "order of the data module's loaders"
            )
        sent = self._sent.pop(client)
        error = result.error if result.update is None else None
        if isinstance(error, ClientCodeError):  # which costs the client its round; before a first good one it is raised
            cause, error.cause = error.cause, None  # its frames hold what the fit has held
            if cause is not None and (self.on_client_error == "raise" or not self._has_good_round):
                raise cause
            if not shown_before("traceback", error.reason):
                whose = named_clients([client], names_of(self.data))
                _log.warning("%s, round %d:\n%s", whose, self.number + 1, error.trace)
        if error is None and simulated is not None:
            error = simulated.fault(result)
        return self._accept(result, sent, error)

    def _accept(self, result: FitResult, sent: Broadcast | None, error: FederationError | None) -> FitResult:
        """Check the update of a fit, unless that has failed, and pass it on to the server."""
        if error is None:
            try:
                self._check(result)
            except Exception as refused:
                error = self._refusal(result, refused)
        self.results.append(replace(result, update=None, personal={}, error=error, resume_state=None))
        if error is not None or sent is None:
            if error is not None and not isinstance(error, StragglerError):
                warnings.warn(f"left out of the aggregation: {self._told(error)}", stacklevel=3)
            return self.results[-1]
        assert result.update is not None
        place, simulated = len(self.results) - 1, self.simulated
        if simulated is not None and result.client in simulated.overdue:
            self.results[-1] = replace(self.results[-1], error=simulated.put_off(result, sent))
            return self.results[-1]
        norms, enough = self.guard.norms(result.update, sent)
        enough = enough and (simulated is None or not simulated.waits)
        if self.robust is not None:
            result = replace(result, update=self.robust.bounded(result.update, sent))
            enough = enough and not self.robust.holds
        self._waiting.append(_Waiting(result if enough else result.with_own_state(), sent, norms, place))
        if enough:
            self._receive_waiting()
        return self.results[-1]

    def _settle(self, simulated: Simulation) -> None:
        """Keep of the updates that wait the first ones that are wanted; take those of earlier rounds that have come."""
        first, waiting, self._waiting = simulated.first(), self._waiting, []
        for each in waiting:
            if each.result.client in first:
                self._waiting.append(each)
            else:
                self.guard.remove(each.norms)
                own = self.results[each.place]
                self.results[each.place] = replace(own, error=simulated.put_off(each.result, each.sent))
        for late in simulated.end_round():
            sent = self.server.broadcast(late.update["client"], self.number)
            result = late.result(self.server.update_class, sent, simulated.discount)
            self._accept(result, sent, None)
            self.traffic.up.subtract(result.update.bytes_by_kind() if result.update else {})  # counted with its fit

    @property
    def _has_good_round(self) -> bool:
        """Whether the server has taken updates in an earlier round."""
        return bool(self.clients.rounds_trained.any())

    def _receive_waiting(self) -> None:
        """Pass on the updates that wait, in the order of the cohort, but for those that lie far from the others.

        A client's personal state was read after ``make_update``, which may still change it. A refused update leaves the
        client as it was before the round, so the state is stored only after the server has taken the update. Whatever
        goes wrong when the server takes it leaves the server as it was before the update.
        """
        waiting, self._waiting = self._waiting, []
        for one in waiting if self.robust is None or not self.robust.holds else self._judged(waiting, self.robust):
            result, before = one.result, None
            try:
                if result.update is not None:
                    self.guard.check(result.update, one.sent, one.norms)
                    if self.mechanism is not None:
                        self.mechanism.add(result.update, one.sent)
                    else:
                        if not hasattr(type(self.server).receive, "whole_or_not"):
                            before = self._last = Snapshot(self.server)  # shares what has not changed since
                        self.server.receive(result.update)
            except Exception as refused:
                if before is not None:
                    before.restore()
                self._leave_out(one, refused)
                continue
            if result.personal:
                self.clients.personal.set(result.client, result.personal)
            if self.clients.resume_states is not None and result.resume_state is not None:
                self.clients.resume_states.set(result.client, result.resume_state)

    def _judged(self, waiting: list[_Waiting], robust: Robust) -> Iterator[_Waiting]:
        """What the server is to receive of a cohort, by the robust rule; nothing where it is too few to judge.

        Of a client that is left out, no update, but the state that it keeps.

        Whoever sent no valid message, or one that lies too far from all others, counts as one that has been found.
        """
        near, entries = list[_Waiting](), list[Entry]()
        for one in waiting:
            assert one.result.update is not None
            try:
                self.guard.check(one.result.update, one.sent, one.norms)
            except InvalidMessageError as refused:
                self._leave_out(one, refused)
            else:
                near.append(one)
                entries.append(Entry(one.result.update, one.sent))
        found = sum(isinstance(result.error, InvalidMessageError) for result in self.results)
        if near and len(near) < robust.least(found):
            self._lacking = f"{len(near)} updates arrived, and {robust!r} needs {robust.least(found)}"
            return
        for one, verdict in zip(near, robust.judge(entries, found) if near else (), strict=True):
            if isinstance(verdict, ClientUpdate):
                yield one._replace(result=replace(one.result, update=verdict))
                continue
            self.left_out.append(one.result.client)
            again = shown_before("robust", one.result.client)
            self._leave_out(one, ClientError(one.result.client, self.number, verdict), tell=not again)
            if not self.server.rolls_back_client_states:  # the state is the client's own, whatever the server takes
                yield one._replace(result=replace(one.result, update=None))

    def _leave_out(self, one: _Waiting, refused: Exception, tell: bool = True) -> None:
        """Leave a client that waits out of the aggregation."""
        error = self._refusal(one.result, refused)
        self.guard.remove(one.norms)
        self.results[one.place] = replace(self.results[one.place], error=error)
        if tell:
            warnings.warn(f"left out of the aggregation: {self._told(error)}", stacklevel=3)

    def _told(self, error: Exception) -> str:
        """An error with the name of its client, where the data have names."""
        return error.told(names_of(self.data)) if isinstance(error, ClientError) else str(error)

    def _refusal(self, result: FitResult, error: Exception) -> FederationError:
        """Why a client is left out of the aggregation."""
        if isinstance(error, ClientError):
            return error
        reason = f"the server cannot use its update ({type(error).__name__}: {error})"
        refused = InvalidMessageError(result.client, self.number, reason)
        refused.__cause__ = error
        return refused

    def _check(self, result: FitResult) -> None:
        """Refuse an update that is not what was asked for, and a personal state of absurd numbers."""
        update, server = result.update, self.server
        extra_states = self.clients.personal.stores if server.rolls_back_client_states else ()
        self._before = self._before or Snapshot(server, extra_states=extra_states)
        if not isinstance(update, ClientUpdate):
            reason = f"make_update returned {type(update).__name__}, expected {server.update_class.__name__}"
            raise InvalidMessageError(result.client, self.number, reason)
        numbers = (update.client, update.round)
        if not all(isinstance(n, Integral) for n in numbers) or numbers != (result.client, self.number):
            shown = int(update.round) + 1 if isinstance(update.round, Integral) else repr(update.round)
            reason = f"the update says it is from client {numbers[0]!r}, round {shown}"
            raise InvalidMessageError(result.client, self.number, reason)
        personal = result.personal
        for (name, tensor), size in zip(personal.items(), magnitudes(list(personal.values())), strict=True):
            if size <= LARGEST:
                continue
            model, before = self.clients.model_and_state(result.client)
            if tensor.is_floating_point() and not math.isfinite(size) and name not in model.uninitialized_buffers:
                reason = f"{name} is not finite after the local fit; lower the learning rate, clip the gradient, or"
                raise ClientError(result.client, self.number, f"{reason} look at this client's data")
            if size > LARGEST and not size <= 1e3 * magnitude(before[name]):
                reason = f"{name}, which it keeps, holds values of up to {size:.1e}, expected at most "
                raise ClientError(result.client, self.number, f"{reason}{LARGEST:.0e}; lower the learning rate")
        self.traffic.up.update(update.bytes_by_kind())
        server.check(update)
        if update.num_samples != result.num_samples:  # which the engine has counted
            update.refuse(
                f"num_samples is {update.num_samples}, expected {result.num_samples}, the number of samples that "
                "the client has trained on: send context.data.num_samples, and a weight for the average in a field of "
                "its own"
            )

    def close(self, min_clients: int = 1) -> Growth:
        """Let the server aggregate; where that fails or ends in numbers that are not finite, the round is undone.

        The server then is as it was before the round, with a warning. Clients keep what they have stored: it comes
        from what the server had sent before. (Unless the server ``rolls_back_client_states``.)

        Args:
            min_clients: Least number of updates to aggregate.

        Returns:
            How the server's numbers have changed, or why the round was undone.

        Raises:
            FederationError: A first round has fewer updates; it names the errors of the clients.
        """
        if self.simulated is not None:
            self._settle(self.simulated)
        self._receive_waiting()
        errors = [result.error for result in self.results if result.error is not None]
        count = len(self.results) - len(errors)
        if self._lacking is not None or count < min_clients:
            more = f"; and {len(errors) - 3} more" if len(errors) > 3 else ""
            few = f"{count} of {len(self.results)} updates can be aggregated, min_clients is {min_clients}"
            fault = f"{self._lacking or few}. {'; '.join(map(self._told, errors[:3]))}{more}".rstrip(" .")
            if self.simulated is not None and all(isinstance(error, StragglerError) for error in errors):
                advice = "the next round follows; a later deadline, late='partial' or a larger cohort may help"
                return self._undo(fault if self._lacking else f"it is empty, {fault}", advice)._replace(fault=None)
            if not self._has_good_round:
                raise FederationError(f"round {self.number + 1}: {fault}") from (errors[0] if errors else None)
            fewer = "use larger cohorts, or a smaller `byzantine`" if self._lacking else "lower min_clients"
            return self._undo(fault, f"look at these clients, or {fewer}")
        if self.mechanism is not None:  # also of a cohort that is empty
            self._before = self._before or Snapshot(self.server)
        before, self._before, self._last = self._before, None, None
        try:
            if self.mechanism is not None:
                self._receive_private(self.mechanism)
            self.server.aggregate()
            growth = Growth(None, 1.0, "") if before is None else before.growth(self.server)
        except Exception as error:
            if before is not None:
                before.restore()
            if isinstance(error, FederationError) or self.number == 0 or before is None:  # most likely an error in code
                raise
            growth = Growth(f"the aggregation fails ({type(error).__name__}: {error})", 1.0, "")
        if growth.fault is not None:
            self._before = before
            advice = "lower the learning rate, clip the gradient, or look for clients with very large updates"
            return self._undo(growth.fault, advice)
        if self.number < CHECKED_ROUNDS:
            self.server.check_not_checkpointed()
        self.guard.end_round(accepted=True)
        self.clients.rounds_trained[[result.client for result in self.results if result.error is None]] += 1
        return growth

    def _receive_private(self, mechanism: PrivacyMechanism) -> None:
        """Let the server receive the update that stands for the cohort: nothing else of its clients."""
        update = mechanism.release(self.server, self.server.broadcast(self.data.participating[0], self.number))
        if update is not None:
            self.server.check(update)
            self.server.receive(update)

    def _undo(self, fault: str, advice: str) -> Growth:
        """Bring the server back to what it was before the round, with a warning."""
        if self._before is not None:
            self._before.restore()
        self._before = self._last = None
        self.guard.end_round(accepted=False)
        warnings.warn(
            f"round {self.number + 1} is undone: {fault}. The server is again as it was before the round; {advice}",
            stacklevel=3,
        )
        return Growth(fault, 1.0, "")

    def drop(self) -> None:
        """Drop the local fits under way; the server forgets what it has received, unless the round is closed.

        Otherwise the sums of an interrupted round would count in the first round of a next fit. Clients keep what they
        have stored, as in :meth:`close`.
        """
        # The loop keeps the round: a suspended engine would keep clients on the device until the next one.
        fits, self.fits = self.fits, iter(())
        if isinstance(fits, Generator):
            fits.close()
        self._waiting.clear()
        self._sent.clear()
        self.guard.end_round(accepted=False)
        if self._before is not None:
            self._before.restore()
            self._before = self._last = None

    def metrics(self) -> dict[str, float]:
        """Training metrics of the round, by the name under which they are logged.

        Loss terms are means over clients. Values that the clients' modules logged themselves are weighted by the
        clients' numbers of samples: means over samples so become means over all samples of the round.
        """
        good = [result for result in self.results if result.error is None]
        found = dict[str, float]()
        for name in sorted({name for result in good for name in result.losses}):
            found[f"train/{name}"] = float(np.mean([r.losses[name] for r in good if name in r.losses]))
        for name in sorted({name for result in good for name in result.logged}):
            own = [result for result in good if name in result.logged]
            values, weights = {r.client: r.logged[name] for r in own}, {r.client: float(r.num_samples) for r in own}
            how = reduction_of(name, own[0].reductions)
            found |= over_clients(name, values, weights, how, names_of(self.data))
        found["train/clients_left_out"] = float(len(self.results) - len(good))
        if self.robust is not None:
            found["robust/left_out"] = float(len(self.left_out))
        if clash := found.keys() & self.server.metrics.keys():
            raise ConfigurationError(
                f"{type(self.server).__name__}.metrics has {min(clash)!r}, which is logged already: take another name"
            )
        found |= self.server.metrics
        return found if self.mechanism is None else found | self.mechanism.metrics()
