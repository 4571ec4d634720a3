"""Workers that are actors of Ray: the engine, and what starts them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.data import FederatedData
from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.workers.engine import WorkerEngine
from pfl_lightning.engines.workers.packing import Packed
from pfl_lightning.engines.workers.pool import WorkerDiedError, WorkerHost
from pfl_lightning.engines.workers.ray_cluster import Cluster, require_ray
from pfl_lightning.engines.workers.worker import Worker
from pfl_lightning.fit.tasks import FitEnvironment


class RayEngine(WorkerEngine):
    """Engine that trains and evaluates clients in worker processes of Ray (``pip install "pfl-lightning[ray]"``).

    A worker gets the data and the architectures once. For a local fit it gets the broadcast and the client's stored
    state, and returns the update and the new state. Tensors that the server sends to all clients are sent to every
    worker once a round. Since all randomness derives from (seed, round, client, purpose), the results do not depend on
    the number of workers, nor on which worker takes which client. On a CPU they equal, bit for bit,
    those of the inner engine with as many threads.

    If a worker dies, or is lost with its node, its clients run again on another worker. Warnings and log lines of the
    workers appear in this process, as do losses and progress.

    Args:
        workers: Number of workers; ``None`` for as many as the cores of the machine (or of the cluster) allow.
        address: Address of a running Ray cluster, such as ``"auto"`` (from a machine of the cluster) or
            ``"host:6379"``; ``None`` starts Ray on this machine for the time of the run. A process that has called
            ``ray.init`` keeps its connection.
        cpus_per_worker: Cores, and threads, of a worker; ``None`` for as many threads as the rule of
            :class:`~pfl_lightning.engines.Engine` gives, one for small models.
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
        cpus_per_worker: int | None = None,
        gpus_per_worker: float | None = None,
        engine: Engine | None = None,
        start_timeout: float = 120.0,
        runtime_env: dict[str, Any] | None = None,
    ) -> None:
        if cpus_per_worker is not None:
            check_at_least("cpus_per_worker", cpus_per_worker, 1)
        if gpus_per_worker is not None:
            check_number("gpus_per_worker", gpus_per_worker)
        super().__init__(workers, cpus_per_worker, engine, start_timeout)
        require_ray()
        self.address, self.cpus_per_worker, self.gpus_per_worker = address, cpus_per_worker, gpus_per_worker
        self.runtime_env = runtime_env

    def connect(self, data: FederatedData, environment: FitEnvironment, threads: int) -> WorkerHost:
        """Connect to Ray, or start it, for workers of so many threads.

        Raises:
            ConfigurationError: Ray is not installed, or no cluster answers at the address.
        """
        on_gpu = environment.device.type == "cuda"
        return RayHost(Cluster(self.address, self.workers, threads, self.gpus_per_worker, on_gpu, self.runtime_env))


@dataclass(eq=False)
class RayWorker:
    """An actor, and the references of the replies that it owes, in the order of the calls."""

    ray: Any
    actor: Any
    replies: deque[Any] = field(default_factory=deque)

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of the actor."""
        with _errors_translated(self.ray):
            self.replies.append(getattr(self.actor, method).remote(*arguments))

    def kill(self) -> None:
        """End the actor."""
        with suppress(Exception):  # Ray itself may have died
            self.ray.kill(self.actor)


class RayHost(WorkerHost):
    """Host of a cluster of Ray.

    Args:
        cluster: The connection.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._ray = cluster, cluster.ray
        self.num_workers, self.device, self.resources = cluster.num_workers, cluster.device, cluster.options
        # Nothing is retried elsewhere: a dead worker is replaced by the pool, where its jobs are known.
        self._make = self._ray.remote(Worker).options(max_restarts=0, max_task_retries=0, **cluster.options)

    def start(self, threads: int) -> RayWorker:
        """Start an actor."""
        with _errors_translated(self._ray):
            return RayWorker(self._ray, self._make.remote(threads, sys.path, get=self._ray.get))

    def receive(self, workers: Sequence[RayWorker], timeout: float) -> tuple[RayWorker, Any] | None:
        """Wait for the first reply, or the first actor that has died."""
        waiting = {worker.replies[0]: worker for worker in workers}
        with _errors_translated(self._ray):
            ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=timeout)
        if not ready:
            return None
        worker = waiting[ready[0]]
        try:
            with _errors_translated(self._ray):
                return worker, self._ray.get(worker.replies.popleft())
        except WorkerDiedError as error:
            return worker, error

    def put(self, packed: Packed) -> Any:
        """Put an object into Ray's memory."""
        with _errors_translated(self._ray):
            return self._ray.put(packed)

    def free(self) -> Any:
        """Resources that Ray has left."""
        return self._ray.available_resources()

    def close(self) -> None:
        """Disconnect."""
        self._cluster.close()


@contextmanager
def _errors_translated(ray: Any) -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayError as error:
        raise WorkerDiedError(f"{type(error).__name__}: {error}") from error
