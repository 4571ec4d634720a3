"""What the pool of workers asks of whoever starts worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pfl_lightning.engines.workers.packing import Packed
from pfl_lightning.errors import FederationError

__all__ = ["WorkerDiedError", "WorkerHost"]


class WorkerDiedError(FederationError):
    """A worker process has ended."""


class WorkerHost(Protocol):
    """Starts the worker processes of one run and passes on calls of their methods.

    Attributes:
        num_workers: Number of workers.
        device: Device of a worker, ``"cpu"`` or ``"cuda"``.
        resources: Resources of a worker, for messages.
        lost: Whether it has died itself, so that nothing may be asked of it.
    """

    num_workers: int
    device: str
    resources: dict[str, Any]

    @property
    def lost(self) -> bool:
        """See the class."""

    def start(self, threads: int) -> Any:
        """Start a :class:`~pfl_lightning.engines.workers.worker.Worker` of so many threads."""

    def call(self, worker: Any, method: str, *arguments: Any) -> Any:
        """Begin a call of a worker's method; a worker answers its calls in their order."""

    def wait(self, calls: Sequence[Any], timeout: float) -> Any | None:
        """Wait for a call that has a reply, or will never have one; ``None`` if there is none in time."""

    def reply(self, call: Any) -> Any:
        """Wait for the reply to a call.

        Raises:
            WorkerDiedError: There will be none.
        """

    def put(self, packed: Packed) -> Any:
        """Put an object where all workers can read it, and return its reference."""

    def kill(self, worker: Any) -> None:
        """End a worker."""

    def free(self) -> Any:
        """Resources that are free, for a message about workers that do not start."""

    def check(self, now: bool = False) -> None:
        """Raise an error if the host itself has died; ``now`` looks although it has just looked."""

    def close(self) -> None:
        """Release what is not a worker's."""
