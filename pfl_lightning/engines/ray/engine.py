"""An engine that spreads the clients over worker processes, on this machine or on a cluster."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any

from pfl_lightning.checks import check_at_least
from pfl_lightning.client import FederatedClient, FitContext, Phase
from pfl_lightning.data import FederatedData
from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.ray.cluster import Cluster, require_ray
from pfl_lightning.engines.ray.packing import Packed, pack, unpack
from pfl_lightning.engines.ray.payloads import HostCopies, PayloadBuilder
from pfl_lightning.engines.ray.pool import Job, WorkerPool
from pfl_lightning.engines.ray.worker import ClientWork, Notice, Reply, Setup, TorchSwitches
from pfl_lightning.engines.sequential import SequentialEngine
from pfl_lightning.engines.tasks import (
    EvaluationResult,
    EvaluationTask,
    FitEnvironment,
    FitResult,
    FitTask,
    PhaseResult,
)
from pfl_lightning.errors import ConfigurationError, FederationError
from pfl_lightning.messages import ClientUpdate

__all__ = ["RayEngine"]

EVALUATED_TOGETHER = 4
"""Clients in one payload of an evaluation without fine-tuning, which takes less time than a fit."""

_log = logging.getLogger(__name__)


class RayEngine(Engine):
    """Engine that trains and evaluates clients in worker processes of Ray (``pip install -e ".[ray]"``).

    A worker gets the data and the architectures once. For a local fit it gets the broadcast and the client's stored
    state, and returns the update and the new state. Tensors that the server sends to all clients are sent to every
    worker once a round. Since all randomness derives from (seed, round, client, purpose), the results do not depend on
    the number of workers, nor on which worker takes which client. On a CPU they equal, bit by bit,
    those of the inner engine with as many threads.

    If a worker dies, or is lost with its node, its clients run again on another worker. Warnings and log lines of the
    workers appear in this process, as do losses and progress.

    Args:
        workers: Number of workers; ``None`` for as many as the cores of the machine (or of the cluster) allow.
        address: Address of a running Ray cluster, such as ``"auto"`` (from a machine of the cluster) or
            ``"host:6379"``; ``None`` starts Ray on this machine for the time of the run. A process that has called
            ``ray.init`` keeps its connection.
        cpus_per_worker: Cores, and threads, of a worker.
        gpus_per_worker: GPUs of a worker, also a fraction; ``None`` divides the GPUs there are among the workers if the
            outer Trainer is on a GPU, and takes none otherwise.
        engine: Engine inside a worker: ``SequentialEngine`` (``None``), ``VectorizedEngine`` or
            ``TrainerEngine``, with its own options, such as clipping.
        start_timeout: Seconds to wait for a first worker.
        runtime_env: Ray's runtime environment of the workers (environment variables, packages to install).
    """

    def __init__(
        self,
        workers: int | None = None,
        address: str | None = None,
        cpus_per_worker: int = 1,
        gpus_per_worker: float | None = None,
        engine: Engine | None = None,
        start_timeout: float = 120.0,
        runtime_env: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if workers is not None:
            check_at_least("workers", workers, 1)
        check_at_least("cpus_per_worker", cpus_per_worker, 1)
        if gpus_per_worker is not None and gpus_per_worker < 0:
            raise ValueError(f"gpus_per_worker must be at least 0, or null, got {gpus_per_worker}")
        if isinstance(engine, RayEngine):
            raise ConfigurationError("engine is the engine inside a worker and cannot be a RayEngine itself")
        require_ray()
        self.workers, self.address = workers, address
        self.cpus_per_worker, self.gpus_per_worker = cpus_per_worker, gpus_per_worker
        self.engine = engine or SequentialEngine()
        self.start_timeout, self.runtime_env = start_timeout, runtime_env
        self.clients_per_batch = self.engine.clients_per_batch
        self.bytes_sent, self.bytes_received = 0, 0  # between this process and the workers, data sets not counted
        self._models: dict[int, int] = {}
        self._tunes = False
        self._cluster: Cluster | None = None
        self._pool: WorkerPool | None = None
        self._said: set[Notice] = set()
        self._bundle_numbers = count()

    # ------------------------------------------------------------------ workers

    def start(self, models: Sequence[FederatedClient], data: FederatedData, environment: FitEnvironment) -> None:
        """Start the workers and send them models, data and settings.

        Raises:
            ConfigurationError: Ray is not installed, no cluster answers at the address, or an object cannot be pickled.
        """
        self.stop()
        setup = _packed(
            "the clients' module or the engine", Setup(tuple(models), self.engine, environment, TorchSwitches.read())
        )
        sent_data = _packed(f"the data ({type(data).__name__})", data)
        on_gpu = environment.device.type == "cuda"
        self._cluster = cluster = Cluster(
            self.address, self.workers, self.cpus_per_worker, self.gpus_per_worker, on_gpu
        )
        options: dict[str, Any] = {"num_cpus": self.cpus_per_worker, "num_gpus": cluster.gpus_per_worker}
        if self.runtime_env:
            options["runtime_env"] = self.runtime_env
        device = "cuda" if cluster.gpus_per_worker > 0 else "cpu"
        self._models = {id(model): index for index, model in enumerate(models)}
        self._tunes = any(model.personalization_phases() for model in models)
        self._pool = WorkerPool(
            cluster.ray,
            cluster.num_workers,
            options,
            self.cpus_per_worker,
            setup,
            sent_data,
            device,
            self.start_timeout,
            self._take_notices,
            cluster.services,
        )

    def stop(self) -> None:
        """Stop the workers, and Ray if it was started for them."""
        pool, self._pool = self._pool, None
        cluster, self._cluster = self._cluster, None
        try:
            if pool is not None:
                pool.close()
        finally:
            if cluster is not None:
                cluster.close()

    def __getstate__(self) -> dict[str, Any]:
        """State without the workers, which belong to this process."""
        return {**self.__dict__, "_cluster": None, "_pool": None, "_models": {}, "_bundle_numbers": count()}

    # ------------------------------------------------------------------ rounds and evaluations

    def run(self, tasks: Iterable[tuple[FederatedClient, FitTask]], environment: FitEnvironment) -> Iterator[FitResult]:
        """Run the local fits of a round on the workers; see :meth:`Engine.run`.

        An update is checked by the server in this process, as under the other engines, and not by the worker.
        """
        copies = HostCopies()
        work = (
            ClientWork(self._models[id(model)], copies.of(task.broadcast), task.personal, carried=task.carried)
            for model, task in tasks
        )
        for result in self._spread(work, "fit", self.clients_per_batch):
            assert isinstance(result, FitResult)
            update = result.update
            # What is no update, the round refuses.
            yield replace(result, update=update.to(environment.device)) if isinstance(update, ClientUpdate) else result

    def evaluate(
        self, tasks: Iterable[tuple[FederatedClient, EvaluationTask]], environment: FitEnvironment
    ) -> Iterator[EvaluationResult]:
        """Evaluate clients on the workers; see :meth:`Engine.evaluate`."""
        copies = HostCopies()
        work = (
            ClientWork(
                self._models[id(model)],
                copies.of(task.broadcast),
                task.stored,
                task.trained,
                task.validation is not None,
                task.test is not None,
            )
            for model, task in tasks
        )
        together = 1 if self._tunes else EVALUATED_TOGETHER
        yield from self._spread(work, "evaluate", max(together, self.clients_per_batch))

    def run_phase(
        self, client: FederatedClient, phase: Phase, context: FitContext, environment: FitEnvironment, purpose: str
    ) -> PhaseResult:
        """Train a single client in this process, as the engine of the workers does."""
        return self.engine.run_phase(client, phase, context, environment, purpose)

    def _spread(self, work: Iterator[ClientWork], method: str, together: int) -> Iterator[Any]:
        if self._pool is None or self._cluster is None:
            raise FederationError("the workers have not been started; a Federation does so: call start() first")
        payloads = PayloadBuilder(self._cluster.ray.put, self._bundle_numbers)

        def jobs() -> Iterator[Job]:
            while group := list(islice(work, together)):
                before, payload = payloads.num_bytes, payloads.make(group)
                self.bytes_sent += payloads.num_bytes - before
                first = group[0].broadcast
                others = f" and {len(group) - 1} more" if len(group) > 1 else ""
                yield Job(payload, method, f"client {first.client}{others}, round {first.round + 1}")

        for reply in self._pool.run(jobs()):
            assert reply.value is not None
            self.bytes_received += reply.value.num_bytes
            yield from unpack(reply.value)

    def _take_notices(self, reply: Reply) -> None:
        """Repeat workers' warnings and log lines in this process, each once: workers do not know those of others."""
        for notice in reply.notices:
            if notice in self._said:
                continue
            self._said.add(notice)
            if notice.category is not None:
                warnings.warn_explicit(notice.text, notice.category, notice.file, notice.line)
            else:
                _log.log(notice.level, "%s", notice.text)


def _packed(what: str, value: Any) -> Packed:
    try:
        return pack(value)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigurationError(
            f"{what} cannot be sent to worker processes: {error}. Leave out what cannot be pickled (open files, "
            "connections, locks) by a __getstate__ of its class, or use SequentialEngine or VectorizedEngine"
        ) from error
