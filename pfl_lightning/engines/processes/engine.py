"""An engine that spreads the clients over worker processes of this machine."""

from __future__ import annotations

import os
import sys

from pfl_lightning.data import FederatedData
from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.processes.host import ProcessHost
from pfl_lightning.engines.workers.engine import WorkerEngine
from pfl_lightning.engines.workers.host import WorkerHost
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.tasks import FitEnvironment

__all__ = ["ProcessEngine"]


class ProcessEngine(WorkerEngine):
    """Engine that trains and evaluates clients in worker processes of this machine, on the CPU.

    It needs nothing beside the package and starts faster than :class:`~pfl_lightning.engines.RayEngine`, whose protocol
    it shares: a worker gets the data and the architectures once, and for a local fit the broadcast and the client's
    stored state. Data and what the server sends to all clients lie in memory that all workers read. The results equal
    bit by bit those of the inner engine in one process with as many threads, whatever the number of workers.

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
        """Return what starts workers of so many threads on this machine.

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
