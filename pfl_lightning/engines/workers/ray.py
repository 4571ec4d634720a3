"""Workers that are actors of Ray: the engine, what starts them, and the connection to a cluster."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.data import FederatedData
from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.workers.engine import WorkerEngine
from pfl_lightning.engines.workers.packing import Packed
from pfl_lightning.engines.workers.pool import WorkerDiedError, WorkerHost
from pfl_lightning.engines.workers.worker import Worker
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.tasks import FitEnvironment

CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Variable of Ray: without clusters its processes listen on the loopback address, which is so on those systems."""


class RayEngine(WorkerEngine):
    """Engine that trains and evaluates clients in worker processes of Ray (the extra ``ray``).

    A worker gets the data and the architectures once. For a local fit it gets the broadcast and the client's stored
    state, and returns the update and the new state. Tensors that the server sends to all clients are sent to every
    worker once a round. Since all randomness derives from (seed, round, client, purpose), the results do not depend on
    the number of workers, nor on which worker takes which client. On a CPU they equal, bit for bit,
    those of the inner engine with as many threads.

    If a worker dies, or is lost with its node, its clients run again on another worker. Warnings and log lines of the
    workers appear in this process, as do losses and progress.

    Args:
        workers: Number of workers; ``None`` for as many as the cores of the machine (or of the cluster) allow, and
            where the outer Trainer is on a GPU for one on each GPU, up to four.
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
        check_at_least("cpus_per_worker", cpus_per_worker, 1, optional=True)
        check_number("gpus_per_worker", gpus_per_worker, optional=True)
        super().__init__(workers, cpus_per_worker, engine, start_timeout)
        require_ray()
        self.address, self.cpus_per_worker, self.gpus_per_worker = address, cpus_per_worker, gpus_per_worker
        self.runtime_env = runtime_env

    def connect(self, data: FederatedData, environment: FitEnvironment, threads: int) -> WorkerHost:
        """Connect to Ray, or start it, for workers with this number of threads.

        Raises:
            ConfigurationError: Ray is not installed, or no cluster answers at the address.
        """
        on_gpu = environment.device.type == "cuda"
        return Cluster(self.address, self.workers, threads, self.gpus_per_worker, on_gpu, self.runtime_env)


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


@contextmanager
def _errors_translated(ray: Any) -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayError as error:
        raise WorkerDiedError(f"{type(error).__name__}: {error}") from error


def require_ray() -> Any:
    """Module ``ray``.

    Raises:
        ConfigurationError: Ray is not installed.
    """
    # Ray sends usage reports by default; that is the user's decision.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            "RayEngine needs Ray, which is not installed: pip install 'pfl-lightning[ray]'"
        ) from error
    return ray


WORKERS_ON_GPUS = 4
"""Workers on GPUs unless another number is asked for: each has a CUDA context of half a GB."""


class Cluster(WorkerHost):
    """Host of workers, and the connection to Ray: started here, joined by address, or already open in this process.

    Args:
        address: Address of a running cluster (``"auto"``, ``"host:6379"``); ``None`` starts one on this machine.
        num_workers: Number of workers; ``None`` for as many as the cores allow, on GPUs for one on each, up to four.
        cpus_per_worker: Cores of a worker.
        gpus_per_worker: GPUs of a worker; ``None`` divides the available GPUs if ``on_gpu``.
        on_gpu: Whether the outer Trainer is on a GPU.
        runtime_env: Ray's runtime environment of the workers.

    Attributes:
        ray: The module ``ray``, connected.
        num_workers: Number of workers.
        resources: Ray's options of a worker.
        device: Device of a worker.

    Raises:
        ConfigurationError: Ray is not installed, the address does not answer, or there are too few GPUs.
    """

    def __init__(
        self,
        address: str | None,
        num_workers: int | None,
        cpus_per_worker: int,
        gpus_per_worker: float | None,
        on_gpu: bool,
        runtime_env: dict[str, Any] | None = None,
    ) -> None:
        self.ray = require_ray()
        self._own = not self.ray.is_initialized()
        starts = self._own and address is None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if starts:
            wanted = num_workers or max(1, cores // cpus_per_worker)
            with listening_here_alone():
                self._init(address="local", num_cpus=max(1, wanted * cpus_per_worker), include_dashboard=False)
        elif self._own:
            self._connect(str(address))
        elif address is not None:
            warnings.warn(f"this process is connected to Ray already; address={address!r} is not used", stacklevel=2)
        try:
            if starts:
                _warn_if_reachable(self.ray)
            there = self.ray.cluster_resources()
            cpus, gpus = cores if starts else int(there.get("CPU", 0)), float(there.get("GPU", 0))
            most = cpus // cpus_per_worker
            if on_gpu and gpus_per_worker is None:
                most = min(most, int(gpus), WORKERS_ON_GPUS)
            self.num_workers = num_workers or max(1, most)
            if self.num_workers * cpus_per_worker > cpus:
                warnings.warn(
                    f"{self.num_workers} workers of {cpus_per_worker} cores each were asked for, there are {cpus} "
                    "cores: they will compete for cores, or wait for one another",
                    stacklevel=2,
                )
            if gpus_per_worker is None:
                gpus_per_worker = gpu_share(gpus, self.num_workers) if on_gpu else 0.0
            if gpus_per_worker > gpus:
                raise ConfigurationError(f"gpus_per_worker is {gpus_per_worker}, Ray finds {gpus:g} GPUs")
            self.resources = {"num_cpus": cpus_per_worker, "num_gpus": gpus_per_worker}
            self.resources |= {"runtime_env": runtime_env} if runtime_env else {}
            self.device = "cuda" if gpus_per_worker > 0 else "cpu"
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str) -> None:
        try:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if host and port.isdigit():  # Ray itself would try for minutes, and end this process
                socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
            self._init(address=address)
        except Exception as error:
            raise ConfigurationError(
                f"no Ray cluster can be reached at address={address!r} ({type(error).__name__}: {error}); start one "
                "with `ray start --head`, or leave out the address for workers on this machine"
            ) from error

    def _init(self, **options: Any) -> None:
        with _own_signals():
            self.ray.init(log_to_driver=True, logging_level=logging.ERROR, **options)

    def start(self) -> RayWorker:
        """Start an actor."""
        with _errors_translated(self.ray):
            return RayWorker(self.ray, self._actor.remote(self.resources["num_cpus"], sys.path, get=self.ray.get))

    @cached_property
    def _actor(self) -> Any:
        # Nothing is retried elsewhere: a dead worker is replaced by the pool, where its jobs are known.
        return self.ray.remote(Worker).options(max_restarts=0, max_task_retries=0, **self.resources)

    def receive(self, workers: Sequence[RayWorker], timeout: float) -> tuple[RayWorker, Any] | None:
        """Wait for the first reply, or the first actor that has died."""
        waiting = {worker.replies[0]: worker for worker in workers}
        with _errors_translated(self.ray):
            ready, _ = self.ray.wait(list(waiting), num_returns=1, timeout=timeout)
        if not ready:
            return None
        worker = waiting[ready[0]]
        try:
            with _errors_translated(self.ray):
                return worker, self.ray.get(worker.replies.popleft())
        except WorkerDiedError as error:
            return worker, error

    def put(self, packed: Packed) -> Any:
        """Put an object into Ray's memory."""
        with _errors_translated(self.ray):
            return self.ray.put(packed)

    def free(self) -> Any:
        """Resources that Ray has left."""
        return self.ray.available_resources()

    def close(self) -> None:
        """Disconnect; a Ray instance that was started here is shut down."""
        if self._own and self.ray.is_initialized():
            self.ray.shutdown()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep signals as they are while Ray starts: those of a job scheduler, and what SIGTERM does here.

    SLURM sends its signals to all processes of a job. They are for the Trainer, and would kill Ray, in whose processes
    they are blocked. On SIGTERM Ray would end this process with exit code 15, without teardown: Lightning's handler,
    which ends a fit in order, would call that of Ray first.
    """
    handler, masks = signal.getsignal(signal.SIGTERM), hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2}) if masks else set()
    try:
        yield
    finally:
        if masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # one that came meanwhile arrives now
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def listening_here_alone() -> Iterator[None]:
    """Let Ray's processes that are started inside listen on the loopback address, where no other machine reaches them.

    Ray reads its variable once, when it is imported, which may have been before. A value of the user's counts.
    """
    constants: Any = sys.modules.get("ray._private.ray_constants")
    if CLUSTERS in os.environ or not hasattr(constants, "ENABLE_RAY_CLUSTER"):
        yield
        return
    before = constants.ENABLE_RAY_CLUSTER
    os.environ[CLUSTERS], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:  # another run of this process may join a cluster
        constants.ENABLE_RAY_CLUSTER = before
        del os.environ[CLUSTERS]


def _warn_if_reachable(ray: Any) -> None:
    """Say so if other machines may reach a Ray that is for this process alone."""
    hosts = {node["NodeManagerAddress"] for node in ray.nodes()}
    reachable = sorted(host for host in hosts - {"::1", "localhost"} if not host.startswith("127."))
    if reachable:
        warnings.warn(
            f"Ray's processes of this run can be reached from other machines, at {', '.join(reachable)}: block them "
            f"with a firewall, or unset {CLUSTERS} if it is set",
            stacklevel=3,
        )


def gpu_share(gpus: float, workers: int) -> float:
    """Number of GPUs per worker such that all fit: whole ones, or a fraction of one, since Ray refuses such as 1.5.

    Args:
        gpus: Number of GPUs that Ray finds.
        workers: Number of workers.
    """
    if gpus < 1:
        return gpus / workers
    return float(gpus // workers) if workers <= gpus else 1 / math.ceil(workers / int(gpus))
