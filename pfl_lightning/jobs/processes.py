"""Processes of jobs: on this machine, or as tasks of a Ray cluster whose machines share the folders of their files.

``python -m pfl_lightning.jobs.processes ENTRY WORDS`` is such a process, which ends when its parent does.
"""

from __future__ import annotations

import os
import pkgutil
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from pfl_lightning.errors import ConfigurationError
from pfl_lightning.jobs.supervision import GRACE, POLL, Job

NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class LocalProcess:
    """A process on this machine, which ends when this one does, however it ends.

    Args:
        job: What it does.
    """

    def __init__(self, job: Job) -> None:
        with opened_log(job) as log:
            self._process = subprocess.Popen(
                job.arguments,
                stdin=subprocess.PIPE,  # never written to: that it closes is what the child waits for
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(job.threads),
                # Ctrl-C in a terminal reaches this process alone, which stops its jobs in order.
                process_group=0 if os.name == "posix" else None,
            )

    def poll(self) -> int | None:
        """Exit code; ``None`` while it runs."""
        code = self._process.poll()
        if code is not None and self._process.stdin is not None:
            self._process.stdin.close()
        return code

    def stop(self) -> None:
        """Ask it to save itself and end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def wait(self) -> int:
        """Wait for its exit code; where the wait is interrupted, the process saves itself and ends."""
        try:
            while (code := self.poll()) is None:
                time.sleep(POLL)  # in small steps: Ray interrupts a task without a signal that would wake it
            return code
        except BaseException:
            self.stop()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
            raise
        finally:
            self.poll()


def opened_log(job: Job) -> IO[bytes]:
    """The log of a job that begins, with its first line; it is not written through a link that leads elsewhere."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    log = open(job.log, "ab", opener=lambda name, flags: os.open(name, flags | NO_LINK, 0o666))  # noqa: SIM115
    log.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} pfl {shlex.join(job.argv)}\n".encode())
    log.flush()
    return log


def environment(threads: int, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a job's process: with its share of threads, and without the job of SLURM that it is in.

    The command that has started it is what a requeued SLURM job resumes.

    Args:
        threads: Threads of its tensor operations.
        inherited: The environment that it changes; by default this process's.
    """
    kept = {key: value for key, value in (inherited or os.environ).items() if not key.startswith("SLURM_")}
    return {**kept, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def last_lines(log: Path, number: int = 8) -> str:
    """The end of a log since the process was started last."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    starts = [position for position, line in enumerate(lines) if line.startswith("--- 2")]
    lines = [line.rstrip() for line in lines[starts[-1] + 1 if starts else 0 :] if line.strip()]
    errors = [position for position, line in enumerate(lines) if line.startswith("pfl: ")]
    return "\n".join(lines[errors[-1] :][:number] if errors else lines[-number:])


# ---------------------------------------------------------------------- on a Ray cluster


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
            from pfl_lightning.engines.workers.ray import listening_here_alone  # torch, which others do without

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

    def __call__(self, job: Job) -> RayProcess:
        """Start a job; it waits until the cluster has room."""
        return RayProcess(self._ray, self._task.remote(job.argv, str(job.log), job.threads, os.getcwd()))


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


def _play(argv: tuple[str, ...], log: str, threads: int, folder: str) -> int:
    """What a worker does: the job, in a process of its own."""
    os.chdir(folder)
    return LocalProcess(Job(argv, Path(log), threads)).wait()


# ---------------------------------------------------------------------- inside the process of a job


def end_with_parent(descriptor: int = 0) -> None:
    """Wait until the other end of standard input is closed, which the system does when the parent is killed, too."""
    while os.read(descriptor, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def play(entry: str) -> None:
    """Do the job, whose words are those of ``sys.argv``, and end when the parent does.

    Args:
        entry: ``module:function`` of what it does.
    """
    threading.Thread(target=end_with_parent, daemon=True).start()
    pkgutil.resolve_name(entry)()


if __name__ == "__main__":
    play(sys.argv.pop(1))
