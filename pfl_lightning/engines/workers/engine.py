"""Base of the engines that spread the clients over worker processes, and the messages to them."""

from __future__ import annotations

import logging
import pickle
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.data import FederatedData
from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.sequential import SequentialEngine
from pfl_lightning.engines.workers.packing import DATA_SETS, Packed, Place, pack, unpack
from pfl_lightning.engines.workers.pool import InWorkerError, Job, WorkerHost, WorkerPool
from pfl_lightning.engines.workers.worker import ClientWork, Payload, Reply, Setup, read_switches
from pfl_lightning.errors import ClientCodeError, ConfigurationError, FederationError
from pfl_lightning.fit.tasks import (
    EvaluationResult,
    EvaluationTask,
    FitEnvironment,
    FitResult,
    FitTask,
    PhaseResult,
)
from pfl_lightning.messages import ClientUpdate
from pfl_lightning.notices import shown_before

WORTH_SHARING = 65_536
"""Bytes from which common tensors go into a bundle; fewer are sent in the payload."""


class PayloadBuilder:
    """Builder of the payloads of one round, or of one evaluation.

    Tensors that the server sends to all clients, and fixed ones, are the same objects in every task. From the second
    payload on they are held as a bundle, which every worker gets once. Tensors are recognized by identity and must not
    change while payloads are made: every round has a new builder.

    Args:
        put: Function that stores an object where workers can read it and returns its reference.
        numbers: Numbers of the bundles. Workers keep bundles by number from round to round, so that a number must not
            be used twice while they live.
    """

    def __init__(self, put: Callable[[Packed], Any], numbers: Iterator[int]) -> None:
        self._put, self._numbers = put, numbers
        self._last: dict[int, dict[int, Tensor]] = {}  # by architecture: the tensors of its last payload, by id
        self._places: dict[int, Place] = {}
        self._bundles: dict[int, tuple[Any, list[Tensor]]] = {}
        self.num_bytes = 0

    def make(self, work: Sequence[ClientWork]) -> Payload:
        """Payload of some clients."""
        own: dict[int, Tensor] = {}
        for piece in work:
            task = piece.task
            state = task.personal if isinstance(task, FitTask) else task.stored
            found = (*(tensor for _, _, tensor in task.broadcast.tensors()), *state.values())
            tensors = {id(tensor): tensor for tensor in found if type(tensor) is torch.Tensor}
            self._bundle(piece.model, tensors)
            own |= tensors
            self._last[piece.model] = tensors
        content = pack(tuple(work), self._places)
        self.num_bytes += content.num_bytes
        used = sorted({self._places[key][0] for key in own if key in self._places})
        bundles = tuple((number, self._bundles[number][0]) for number in used)
        return Payload(content, bundles, frozenset(self._bundles))

    def _bundle(self, model: int, tensors: Mapping[int, Tensor]) -> None:
        before = self._last.get(model, {})
        common = [tensor for key, tensor in tensors.items() if key in before and key not in self._places]
        if sum(tensor.numel() * tensor.element_size() for tensor in common) < WORTH_SHARING:
            return
        number = next(self._numbers)
        packed = pack(common)
        self.num_bytes += packed.num_bytes
        self._bundles[number] = (self._put(packed), common)  # held, so that no other tensor gets one of the ids
        self._places |= {id(tensor): (number, position) for position, tensor in enumerate(common)}


EVALUATED_TOGETHER = 4
"""Clients in one payload of an evaluation without fine-tuning, which takes less time than a fit."""

_log = logging.getLogger(__name__)


class WorkerEngine(Engine):
    """Base of the engines that train and evaluate clients in worker processes.

    Args:
        workers: Number of workers; ``None`` lets the host choose.
        threads: Threads of a worker; ``None`` for as many as the rule of :class:`~pfl_lightning.engines.Engine` gives.
        engine: Engine inside a worker; ``None`` is ``SequentialEngine``.
        start_timeout: Seconds to wait for a first worker.
    """

    def __init__(self, workers: int | None, threads: int | None, engine: Engine | None, start_timeout: float) -> None:
        super().__init__(threads=threads)
        check_at_least("workers", workers, 1, optional=True)
        check_number("start_timeout", start_timeout, strict=True)
        if isinstance(engine, WorkerEngine):
            name = type(engine).__name__
            raise ConfigurationError(f"engine is the engine inside a worker and cannot be a {name} itself")
        self.workers, self.start_timeout = workers, start_timeout
        self.engine = engine or SequentialEngine()
        self.threads = self.engine.threads if threads is None else threads
        self.gradient_clip_val = self.engine.gradient_clip_val  # for checks of what the run does
        self.gradient_clip_algorithm = self.engine.gradient_clip_algorithm
        self.clients_per_batch = self.engine.clients_per_batch
        self.bytes_sent, self.bytes_received = 0, 0  # between this process and the workers, data sets not counted
        self._models: dict[int, int] = {}
        self._tunes = False
        self._host: WorkerHost | None = None
        self._pool: WorkerPool | None = None
        self._bundle_numbers = count()

    @abstractmethod
    def connect(self, data: FederatedData, environment: FitEnvironment, threads: int) -> WorkerHost:
        """Return what starts the workers.

        Args:
            data: Every client's data.
            environment: Settings of the run.
            threads: Threads of a worker.
        """

    # ------------------------------------------------------------------ workers

    def start(self, models: Sequence[FederatedClient], data: FederatedData, environment: FitEnvironment) -> None:
        """Start the workers and send them models, data and settings.

        Raises:
            ConfigurationError: There can be no workers, or an object cannot be pickled.
        """
        self.stop()
        known = {id(dataset): (DATA_SETS, place) for place, dataset in enumerate(getattr(data, "divided_datasets", ()))}
        setup = _packed(
            "the clients' module or the engine",
            Setup(tuple(models), self.engine, environment, read_switches(), tuple(warnings.filters)),
            known,
        )
        sent_data = _packed(f"the data ({type(data).__name__})", data)
        super().start(models, data, environment)  # the server computes on as many threads as under the other engines
        try:
            self._host = host = self.connect(data, environment, self._held or 1)
            self._models = {id(model): index for index, model in enumerate(models)}
            self._tunes = any(model.personalization_phases() for model in models)
            self._pool = WorkerPool(type(self).__name__, host, setup, sent_data, self.start_timeout, self._take_notices)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the workers, and what was started for them."""
        super().stop()
        pool, self._pool = self._pool, None
        host, self._host = self._host, None
        try:
            if pool is not None:
                pool.close()
        finally:
            if host is not None:
                host.close()

    def __getstate__(self) -> dict[str, Any]:
        """State without the workers, which belong to this process."""
        return {**self.__dict__, "_host": None, "_pool": None, "_models": {}, "_bundle_numbers": count()}

    # ------------------------------------------------------------------ rounds and evaluations

    def run(self, tasks: Iterable[tuple[FederatedClient, FitTask]], environment: FitEnvironment) -> Iterator[FitResult]:
        """Run the local fits of a round on the workers; see :meth:`Engine.run`.

        An update is checked by the server in this process, as under the other engines, and not by the worker.
        """
        for result in self._spread(tasks, "fit", self.clients_per_batch, environment):
            assert isinstance(result, FitResult)
            if isinstance(result.error, ClientCodeError) and result.error.cause is not None:
                result.error.cause.__cause__ = InWorkerError(result.error.trace)
            update = result.update
            # What is no update, the round refuses.
            yield replace(result, update=update.to(environment.device)) if isinstance(update, ClientUpdate) else result

    def evaluate(
        self, tasks: Iterable[tuple[FederatedClient, EvaluationTask]], environment: FitEnvironment
    ) -> Iterator[EvaluationResult]:
        """Evaluate clients on the workers; see :meth:`Engine.evaluate`."""
        together = 1 if self._tunes else EVALUATED_TOGETHER
        yield from self._spread(tasks, "evaluate", max(together, self.clients_per_batch), environment)

    def run_phase(
        self, client: FederatedClient, phase: Phase, context: FitContext, environment: FitEnvironment, purpose: str
    ) -> PhaseResult:
        """Train a single client in this process, as the engine of the workers does."""
        return self.engine.run_phase(client, phase, context, environment, purpose)

    def _spread(
        self, tasks: Iterable[tuple[FederatedClient, Any]], method: str, together: int, environment: FitEnvironment
    ) -> Iterator[Any]:
        if self._pool is None or self._host is None:
            raise FederationError("the workers have not been started; a Federation does so: call start() first")
        payloads = PayloadBuilder(self._host.put, self._bundle_numbers)
        work = (ClientWork.of(self._models[id(model)], task) for model, task in tasks)

        def jobs() -> Iterator[Job]:
            while group := list(islice(work, together)):
                before, made = payloads.num_bytes, payloads.make(group)
                payload = replace(made, clock=environment.clock, choices=dict(self.choices))
                self.bytes_sent += payloads.num_bytes - before
                first = group[0].task.broadcast
                others = f" and {len(group) - 1} more" if len(group) > 1 else ""
                yield Job(payload, method, f"client {first.client}{others}, round {first.round + 1}")

        for reply in self._pool.run(jobs()):
            assert reply.value is not None
            self.bytes_received += reply.value.num_bytes
            results, choices = unpack(reply.value)
            self.choices = choices | self.choices  # the first that a worker has made is that of the run
            yield from results

    def _take_notices(self, reply: Reply) -> None:
        """Repeat workers' warnings and log lines in this process, each once: workers do not know those of others."""
        for notice in reply.notices:
            if shown_before(notice.same or notice.text, notice.category, notice.file, notice.line):
                continue
            if notice.category is not None:
                warnings.warn_explicit(notice.text, notice.category, notice.file, notice.line)
            else:
                _log.log(notice.level, "%s", notice.text)


def _packed(what: str, value: Any, known: Mapping[int, Place] | None = None) -> Packed:
    try:
        return pack(value, known)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigurationError(
            f"{what} cannot be sent to worker processes: {error}. Leave out what cannot be pickled (open files, "
            "connections, locks) by a __getstate__ of its class, or use SequentialEngine or VectorizedEngine"
        ) from error
