"""Workers that are processes of this machine: the engine, what starts them, and what each of them runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any

from pfl_lightning.data import FederatedData
from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.workers.engine import WorkerEngine
from pfl_lightning.engines.workers.packing import Packed, SharedBytes, receive, send
from pfl_lightning.engines.workers.pool import WorkerDiedError, WorkerHost
from pfl_lightning.engines.workers.worker import Worker
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.tasks import FitEnvironment


class ProcessEngine(WorkerEngine):
    """Engine that trains and evaluates clients in worker processes of this machine, on the CPU.

    It needs nothing beside the package and starts faster than :class:`~pfl_lightning.engines.RayEngine`, whose protocol
    it shares: a worker gets the data and the architectures once, and for a local fit the broadcast and the client's
    stored state. Data and what the server sends to all clients lie in memory that all workers read. The results equal
    bit for bit those of the inner engine in one process with as many threads, whatever the number of workers.

    If a worker dies, its clients run again on another one. Warnings and log lines of the workers appear in this
    process. Workers end with the run, and with this process, however it ends.

    Classes and functions of a script or notebook itself reach the workers where the package cloudpickle is installed;
    the script is not run again.

    Args:
        workers: Number of workers; ``None`` for as many as the cores that this process may use, divided by the threads
            of each, and not more than there are clients.
        threads: Threads of a worker; see :class:`~pfl_lightning.engines.Engine`.
        engine: Engine inside a worker: ``SequentialEngine`` (``None``), ``VectorizedEngine`` or ``TrainerEngine``, with
            its own options, such as clipping.
        start_timeout: Seconds to wait for a first worker.
    """

    def __init__(
        self,
        workers: int | None = None,
        threads: int | None = None,
        engine: Engine | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        super().__init__(workers, threads, engine, start_timeout)
        if sys.platform == "win32":
            raise ConfigurationError("ProcessEngine needs Linux or macOS; use RayEngine")

    def connect(self, data: FederatedData, environment: FitEnvironment, threads: int) -> WorkerHost:
        """Return what starts workers with this number of threads on this machine.

        Raises:
            ConfigurationError: The outer Trainer is not on the CPU.
        """
        if environment.device.type != "cpu":
            raise ConfigurationError(
                f"ProcessEngine trains on the CPU, and the Trainer is on {environment.device}: use "
                "--trainer.accelerator cpu, or on a GPU VectorizedEngine, or RayEngine with gpus_per_worker"
            )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return ProcessHost(self.workers or max(1, min(cores // threads, data.num_clients)), threads)


PROGRAM = """
import os, select, signal, sys, threading
def end_with_parent():
    line = select.poll()
    line.register({handle}, select.POLLHUP)
    line.poll()
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end_with_parent, daemon=True).start()
sys.path[:] = {path!r}
from pfl_lightning.engines.workers.processes import serve
serve({handle})
"""
"""Program of a worker. It watches its line before its imports, which take seconds, and ends with the other process."""


def launch(handle: int) -> subprocess.Popen[bytes]:
    """Start a process that serves calls.

    Args:
        handle: Number of the open socket that it gets.
    """
    program = PROGRAM.format(path=sys.path, handle=handle)
    return subprocess.Popen(
        [sys.executable, "-u", "-c", program],  # a worker is killed: what it prints must not wait in a buffer
        stdin=subprocess.DEVNULL,
        pass_fds=[handle],
        start_new_session=True,
    )


class WorkerProcess:
    """A worker process; its methods are those of :class:`~pfl_lightning.engines.workers.worker.Worker`.

    It runs in a session of its own, which Ctrl-C in a terminal does not reach, and does not run this process's script.

    Args:
        threads: Threads of the worker.
        path: Further entries of ``sys.path``.
    """

    def __init__(self, threads: int, path: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = launch(theirs.fileno())
        self.connection = Connection(ours.detach())
        self.ended: str | None = None
        self.send("__init__", threads, list(path))

    def send(self, method: str, *arguments: Any) -> None:
        """Send a call; one to a process that has ended is lost."""
        if self.ended is None:
            try:
                send(self.connection, (method, arguments))
            except OSError:
                self._note_end()

    def receive(self) -> Any:
        """Wait for the next reply, or for the end of the process."""
        if self.ended is None:
            try:
                return receive(self.connection)
            except (EOFError, OSError):
                self._note_end()
        return WorkerDiedError(self.ended)

    def kill(self) -> None:
        """End the process, and what it has started."""
        self.ended = self.ended or "it was stopped"
        self.connection.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _note_end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.poll()
        by = (
            f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        )
        self.ended = f"process {self._process.pid} {by}"


class ProcessHost(WorkerHost):
    """Host of processes of this machine; their shared memory goes with what refers to it.

    Args:
        num_workers: Number of workers.
        threads: Threads of each.
    """

    def __init__(self, num_workers: int, threads: int) -> None:
        self.num_workers, self.device = num_workers, "cpu"
        self.resources: dict[str, Any] = {"threads": threads}

    def start(self) -> WorkerProcess:
        """Start a process."""
        return WorkerProcess(self.resources["threads"], sys.path)

    def receive(self, workers: Sequence[WorkerProcess], timeout: float) -> tuple[WorkerProcess, Any] | None:
        """Wait for the first reply, or the first worker that ends."""
        ready = [worker for worker in workers if worker.ended is not None]
        if not ready:
            found = wait([worker.connection for worker in workers], timeout)
            ready = [worker for worker in workers if worker.connection in found]
        return (ready[0], ready[0].receive()) if ready else None

    def put(self, packed: Packed) -> SharedBytes:
        """Put an object into memory that all workers read."""
        return SharedBytes.of(packed)

    def free(self) -> dict[str, Any]:
        """Cores of this machine."""
        return {"cores": os.cpu_count()}


def serve(handle: int) -> None:
    """Answer calls of a worker's methods.

    Args:
        handle: Number of the open socket to the process that started this one.
    """
    # For the Trainer's process, which ends this one. They come from a scheduler, who sends them to all processes.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), lambda *_: None)
    connection, calls = Connection(handle), SimpleQueue[Any]()
    Thread(target=_take_calls, args=(connection, calls), daemon=True).start()
    _, (threads, path) = calls.get()
    worker = Worker(threads, path, get=SharedBytes.load)
    while True:
        method, arguments = calls.get()
        send(connection, getattr(worker, method)(*arguments))


def _take_calls(connection: Connection, calls: SimpleQueue[Any]) -> None:
    """Take calls while others are computed: the other process never waits until its message is read."""
    try:
        while True:
            calls.put(receive(connection))
    except (EOFError, OSError):
        pass
    except BaseException:
        traceback.print_exc()  # a message that cannot be read
    finally:
        os.killpg(0, signal.SIGKILL)  # with processes of its own, such as those of a data loader
