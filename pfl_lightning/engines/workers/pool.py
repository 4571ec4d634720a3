"""Pool of worker processes, which hands out jobs and replaces workers that die."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pfl_lightning.engines.workers.packing import Packed, unpack
from pfl_lightning.engines.workers.worker import Payload, Reply, versions
from pfl_lightning.errors import ConfigurationError, FederationError


class WorkerDiedError(FederationError):
    """A worker process has ended."""


class WorkerHost(ABC):
    """Starts the worker processes of one run and takes their replies.

    A worker has two functions: ``send(method, *arguments)``, a call of one of the methods of
    :class:`~pfl_lightning.engines.workers.worker.Worker`, which it answers in their order, and ``kill()``.

    Attributes:
        num_workers: Number of workers.
        device: Device of a worker, ``"cpu"`` or ``"cuda"``.
        resources: Resources of a worker, for messages.
    """

    num_workers: int
    device: str
    resources: dict[str, Any]

    @abstractmethod
    def start(self) -> Any:
        """Start a worker."""

    @abstractmethod
    def receive(self, workers: Sequence[Any], timeout: float) -> tuple[Any, Any] | None:
        """Wait for the next reply of one of the workers, each of which has been sent a call.

        Returns:
            That worker and its reply, a :class:`WorkerDiedError` where it has ended; ``None`` if no reply is in time.
        """

    @abstractmethod
    def put(self, packed: Packed) -> Any:
        """Put an object where all workers can read it, and return its reference."""

    @abstractmethod
    def free(self) -> Any:
        """Resources that are free, for a message about workers that do not start."""

    def close(self) -> None:  # noqa: B027  # a host need not hold anything
        """Release what is not a worker's."""


_log = logging.getLogger(__name__)

MAX_WORKER_DEATHS = 3
"""Number of workers that may die on one payload before the run fails."""

WAIT = 1.0
"""Seconds of waiting for a reply at a time, so that signals are seen."""


@dataclass(eq=False)
class Job:
    """Job for a worker.

    Attributes:
        payload: The worker's input.
        method: Name of the method of :class:`~pfl_lightning.engines.workers.worker.Worker` that takes it.
        about: Clients and round, for messages.
        deaths: Number of workers that died while they ran it.
    """

    payload: Payload
    method: str
    about: str
    deaths: int = 0


@dataclass(eq=False)
class _Run:
    """Jobs of a round or an evaluation by number: jobs not handed out yet, and replies waiting for earlier ones."""

    waiting: deque[tuple[int, Job]] = field(default_factory=deque)
    done: dict[int, Reply] = field(default_factory=dict)


@dataclass(eq=False)
class _WorkerSlot:
    """Place of a worker. It runs the first of its jobs; the others wait in its queue."""

    worker: Any
    started: bool = False  # whether the reply to Worker.prepare has come
    jobs: deque[tuple[_Run, int, Job]] = field(default_factory=deque)


class WorkerPool:
    """Pool of a fixed number of workers.

    Args:
        name: Name of the engine, for messages.
        host: What starts the workers.
        setup: Packed :class:`~pfl_lightning.engines.workers.worker.Setup` of every worker.
        data: Packed data of all clients.
        patience: Seconds to wait for a first worker.
        take: Called with every reply, for its notices.
    """

    def __init__(
        self,
        name: str,
        host: WorkerHost,
        setup: Packed,
        data: Packed,
        patience: float,
        take: Callable[[Reply], None],
    ) -> None:
        self._name, self._patience, self._take = name, patience, take
        self._host, self._inputs = host, ([host.put(setup)], [host.put(data)])
        self._failed_starts = 0
        self._slots = [self._new_slot() for _ in range(host.num_workers)]

    # ------------------------------------------------------------------ jobs

    def run(self, jobs: Iterable[Job]) -> Iterator[Reply]:
        """Replies in the order of the jobs, which are taken as workers become free.

        Several runs may be under way: a validation in the middle of a round asks for its own replies.
        """
        self._replace_dead_idlers()
        own, source, number, expected = _Run(), enumerate(jobs), 0, 0
        most = 4 * len(self._slots)  # replies that may wait for an earlier one
        exhausted = False
        try:
            while True:
                while not exhausted and len(own.waiting) <= len(self._slots) and number - expected < most:
                    found = next(source, None)
                    if found is None:
                        exhausted = True
                    else:
                        own.waiting.append(found)
                        number += 1
                self._hand_out(own)
                if expected == number and exhausted:
                    return
                if expected not in own.done:
                    self._collect()
                while expected in own.done:
                    expected += 1
                    yield own.done.pop(expected - 1)
        finally:  # stopped early: jobs of this run that workers still have are dropped
            for slot in list(self._slots):
                if any(run is own for run, _, _ in slot.jobs):
                    others = [entry for entry in slot.jobs if entry[0] is not own]
                    self._renew(slot)
                    for run, place, job in reversed(others):
                        run.waiting.appendleft((place, job))

    def _replace_dead_idlers(self) -> None:
        """Replace workers that died while idle, which is noticed only on a call and is no job's fault."""
        idle = {slot.worker: slot for slot in self._slots if slot.started and not slot.jobs}
        for worker in idle:
            worker.send("alive")
        while idle:
            worker, reply = self._receive(idle)
            slot = idle.pop(worker)
            if isinstance(reply, WorkerDiedError):
                _log.warning("%s: an idle worker died and is replaced (%s)", self._name, _lines(reply)[0])
                self._renew(slot)

    def _hand_out(self, run: _Run) -> None:
        """Give every free worker a job, and a second one in its queue while there are enough for all."""
        ready = [slot for slot in self._slots if slot.started]
        for held in (0, 1):
            for slot in ready:
                if len(slot.jobs) == held and len(run.waiting) > held * len(self._slots):
                    number, job = run.waiting.popleft()
                    slot.worker.send(job.method, job.payload)
                    slot.jobs.append((run, number, job))

    def _collect(self) -> None:
        """Wait for a reply, a started worker, or a dead one."""
        busy = {slot.worker: slot for slot in self._slots if slot.jobs or not slot.started}
        worker, reply = self._receive(busy)
        slot = busy[worker]
        if isinstance(reply, WorkerDiedError):
            self._replace(slot, reply)
            return
        self._take(reply)
        if reply.error is not None:
            error: Exception = unpack(reply.error)
            missing = isinstance(error, ImportError) or (isinstance(error, AttributeError) and "__main__" in str(error))
            raise (_cannot_import(error) if missing and not slot.started else error) from InWorkerError(reply.traceback)
        if slot.started:
            run, number, _ = slot.jobs.popleft()
            run.done[number] = reply
        else:
            slot.started, self._failed_starts = True, 0

    def _receive(self, workers: Collection[Any]) -> tuple[Any, Any]:
        """Wait for the next reply of one of the workers, with no limit of time once any worker has started."""
        patience = math.inf if any(slot.started for slot in self._slots) else self._patience
        waited = 0.0
        while waited < patience:
            step = min(WAIT, patience - waited)
            found = self._host.receive(list(workers), step)
            if found is not None:
                return found
            waited += step
        raise FederationError(
            f"no worker has started within {self._patience:g} s; {self._host.num_workers} workers with "
            f"{self._host.resources} were asked for, and there are {self._host.free()} free: ask for less, or "
            "raise start_timeout"
        )

    # ------------------------------------------------------------------ workers

    def _new_slot(self) -> _WorkerSlot:
        worker = self._host.start()
        worker.send("prepare", *self._inputs, self._host.device, versions())
        return _WorkerSlot(worker)

    def _replace(self, slot: _WorkerSlot, error: Exception) -> None:
        """Hand a dead worker's jobs to others; a fit depends on its task alone, so that the result is the same."""
        if not slot.started and ("No module named" in str(error) or "ModuleNotFoundError" in str(error)):
            raise _cannot_import(error) from error
        lost = list(slot.jobs)
        if lost:
            lost[0][2].deaths += 1
            deaths, about = lost[0][2].deaths, lost[0][2].about
        else:
            self._failed_starts += 1
            deaths, about = self._failed_starts, "the start of workers"
        if deaths >= MAX_WORKER_DEATHS:
            raise FederationError(
                f"{about}: {deaths} workers in turn have died on it, the last: {_lines(error)[0]}; "
                "if the system killed them for lack of memory, use fewer workers"
            ) from error
        message = "%s: a worker died on %s and is replaced (%s)"
        _log.warning(message, self._name, about, _lines(error)[0])
        for run, number, again in reversed(lost):
            run.waiting.appendleft((number, again))
        self._renew(slot)

    def _renew(self, slot: _WorkerSlot) -> None:
        slot.worker.kill()
        fresh = self._new_slot()
        slot.worker, slot.started, slot.jobs = fresh.worker, False, fresh.jobs

    def close(self) -> None:
        """Stop all workers and drop their jobs."""
        for slot in self._slots:
            slot.worker.kill()
        self._slots = []


class InWorkerError(Exception):
    """Cause of an error, which shows the worker's traceback."""

    def __str__(self) -> str:
        return f"in a worker process:\n{self.args[0]}"


def _cannot_import(error: Exception) -> ConfigurationError:
    return ConfigurationError(
        "a worker cannot import what it needs; install pfl-lightning, and the modules with your own classes, wherever "
        "workers run. What is defined in the script or notebook itself reaches them only with the package cloudpickle: "
        "pip install cloudpickle, or move it into a module. "
        f"{type(error).__name__}: {_lines(error)[-1]}"
    )


def _lines(error: Exception) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
