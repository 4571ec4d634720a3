"""Jobs as tasks of a Ray cluster, whose machines share the folders of their files."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.jobs.local import LocalProcess
from pfl_lightning.jobs.supervision import Job

__all__ = ["RayStarter"]


class RayStarter:
    """Starts jobs as tasks of a Ray cluster.

    Args:
        address: The cluster's address, ``auto`` for the one that this machine belongs to, ``local`` for one that lasts
            as long as the command.
        threads: Cores that each job takes.
        gpus: GPUs that each job takes, such as 0.25.

    Raises:
        ConfigurationError: Ray is not installed, or there is no such cluster.
    """

    def __init__(self, address: str, threads: int = 1, gpus: float = 0.0) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigurationError("--ray needs Ray: pip install 'pfl-lightning[ray]'") from error
        here: AbstractContextManager[None] = nullcontext()
        if address == "local":
            from pfl_lightning.engines.ray.cluster import listening_here_alone  # torch, which others do without

            here = listening_here_alone()
        try:
            with here:
                ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigurationError(f"--ray {address}: there is no such cluster ({error})") from error
        self._ray = ray
        # A job that is lost with its machine is left to the command, which goes on from the last checkpoint.
        self._task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)(_play)

    @property
    def cores(self) -> int:
        """Cores of the cluster."""
        return int(self._ray.cluster_resources().get("CPU", 1))

    def start(self, job: Job) -> RayProcess:
        """Start a job; it waits until the cluster has room."""
        return RayProcess(self._ray, self._task.remote(job.words, str(job.log), job.threads, os.getcwd()))


class RayProcess:
    """A job that is a task of Ray.

    Args:
        ray: The package.
        task: What the task will return.
    """

    def __init__(self, ray: Any, task: Any) -> None:
        self._ray = ray
        self._task = task
        self._code: int | None = None

    def poll(self) -> int | None:
        """Exit code; ``None`` while it waits or runs, 1 where the cluster has lost it."""
        if self._code is None and self._ray.wait([self._task], timeout=0)[0]:
            try:
                self._code = int(self._ray.get(self._task))
            except Exception:  # the worker's machine has gone, or the task was canceled
                self._code = 1
        return self._code

    def stop(self) -> None:
        """Interrupt the task, which ends its process in order."""
        self._ray.cancel(self._task, force=False)

    def kill(self) -> None:
        """End the task's worker at once, and with it the process."""
        self._ray.cancel(self._task, force=True)


def _play(words: tuple[str, ...], log: str, threads: int, folder: str) -> int:
    """What a worker does: the job, in a process of its own."""
    os.chdir(folder)
    return LocalProcess(Job(words, Path(log), threads)).wait()
