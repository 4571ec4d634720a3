"""Workers that are actors of Ray."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pfl_lightning.engines.ray.cluster import Cluster
from pfl_lightning.engines.workers.host import WorkerDiedError
from pfl_lightning.engines.workers.packing import Packed
from pfl_lightning.engines.workers.worker import Worker

__all__ = ["RayHost"]


class RayHost:
    """A :class:`~pfl_lightning.engines.workers.host.WorkerHost` of a cluster of Ray.

    Args:
        cluster: The connection.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._ray = cluster, cluster.ray
        self.num_workers, self.device, self.resources = cluster.num_workers, cluster.device, cluster.options
        # Nothing is retried elsewhere: a dead worker is replaced by the pool, where its jobs are known.
        self._make = self._ray.remote(Worker).options(max_restarts=0, max_task_retries=0, **cluster.options)

    @property
    def lost(self) -> bool:
        """Whether Ray has died."""
        return self._cluster.services.lost

    def start(self, threads: int) -> Any:
        """Start an actor."""
        with _errors_translated(self._ray):
            return self._make.remote(threads, sys.path, get=self._ray.get)

    def call(self, worker: Any, method: str, *arguments: Any) -> Any:
        """Begin a call."""
        with _errors_translated(self._ray):
            return getattr(worker, method).remote(*arguments)

    def wait(self, calls: Sequence[Any], timeout: float) -> Any | None:
        """Wait for one of the calls."""
        with _errors_translated(self._ray):
            ready, _ = self._ray.wait(list(calls), num_returns=1, timeout=timeout)
        return ready[0] if ready else None

    def reply(self, call: Any) -> Any:
        """Wait for a reply."""
        with _errors_translated(self._ray):
            return self._ray.get(call)

    def put(self, packed: Packed) -> Any:
        """Put an object into Ray's memory."""
        with _errors_translated(self._ray):
            return self._ray.put(packed)

    def kill(self, worker: Any) -> None:
        """End an actor."""
        self._ray.kill(worker)

    def free(self) -> Any:
        """Resources that Ray has left."""
        return self._ray.available_resources()

    def check(self, now: bool = False) -> None:
        """Knock at Ray's services."""
        self._cluster.services.check(now)

    def close(self) -> None:
        """Disconnect."""
        self._cluster.close()


@contextmanager
def _errors_translated(ray: Any) -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayError as error:
        raise WorkerDiedError(f"{type(error).__name__}: {error}") from error
