"""Connection to Ray: a local instance or a running cluster."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pfl_lightning.errors import ConfigurationError

CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Variable of Ray: without clusters its processes listen on the loopback address, which is so on those systems."""


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


class Cluster:
    """Connection to Ray: started here, joined by address, or already open in this process.

    Args:
        address: Address of a running cluster (``"auto"``, ``"host:6379"``); ``None`` starts one on this machine.
        num_workers: Number of workers; ``None`` for as many as the cores allow.
        cpus_per_worker: Cores of a worker.
        gpus_per_worker: GPUs of a worker; ``None`` divides the available GPUs if ``on_gpu``.
        on_gpu: Whether the outer Trainer is on a GPU.
        runtime_env: Ray's runtime environment of the workers.

    Attributes:
        ray: The module ``ray``, connected.
        num_workers: Number of workers.
        options: Ray's resources of a worker.
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
            self.num_workers = num_workers or max(1, cpus // cpus_per_worker)
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
            self.options: dict[str, Any] = {"num_cpus": cpus_per_worker, "num_gpus": gpus_per_worker}
            self.options |= {"runtime_env": runtime_env} if runtime_env else {}
            self.device = "cuda" if gpus_per_worker > 0 else "cpu"
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str) -> None:
        try:
            _knock(address)  # Ray itself would try for minutes, and end this process
            self._init(address=address)
        except Exception as error:
            raise ConfigurationError(
                f"no Ray cluster can be reached at address={address!r} ({type(error).__name__}: {error}); start one "
                "with `ray start --head`, or leave out the address for workers on this machine"
            ) from error

    def _init(self, **options: Any) -> None:
        with _signals_kept_from_children(), _own_handler_of_sigterm():
            self.ray.init(log_to_driver=True, logging_level=logging.ERROR, **options)

    def close(self) -> None:
        """Disconnect; a Ray instance that was started here is shut down."""
        if self._own and self.ray.is_initialized():
            self.ray.shutdown()


@contextmanager
def _signals_kept_from_children() -> Iterator[None]:
    """Block a job scheduler's signals in the processes that are started here.

    SLURM sends them to all processes of a job. They are for the Trainer, and would kill Ray.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # one that came meanwhile arrives now


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


@contextmanager
def _own_handler_of_sigterm() -> Iterator[None]:
    """Keep Ray from deciding what this process does on SIGTERM: Ray would end it with exit code 15, without teardown.

    Lightning's handler, which ends a fit in order, would call that of Ray first.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


def _warn_if_reachable(ray: Any) -> None:
    """Say so if other machines may reach a Ray that is for this process alone."""
    hosts = {node["NodeManagerAddress"] for node in ray.nodes()}
    reachable = sorted(host for host in hosts - {"::1", "localhost"} if not host.startswith("127."))
    if reachable:
        warnings.warn(
            f"Ray's processes of this run can be reached from other machines, at {', '.join(reachable)}: keep them out "
            f"by a firewall, or unset {CLUSTERS} if it is set",
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


def _knock(address: str, seconds: float = 10.0) -> None:
    """Try a connection to ``host:port``; other addresses are left to Ray."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
