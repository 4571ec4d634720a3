"""Jobs in processes on this machine.

``python -m pfl_lightning.jobs.local WORDS`` is such a process: ``pfl WORDS``, which ends when its parent does.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from pfl_lightning.jobs.supervision import GRACE, POLL, Job

__all__ = ["LocalProcess", "LocalStarter", "cores", "end_with_parent", "environment", "last_lines"]


class LocalStarter:
    """Starts jobs as processes on this machine."""

    def start(self, job: Job) -> LocalProcess:
        """Start a job."""
        return LocalProcess(job)


class LocalProcess:
    """A process on this machine, which ends when this one does, however it ends.

    Args:
        job: What it does.
    """

    def __init__(self, job: Job) -> None:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with open(job.log, "ab", opener=_no_link) as log:
            log.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} pfl {shlex.join(job.words)}\n".encode())
            log.flush()
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


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def environment(threads: int, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a job's process: with its share of threads, and without the job of SLURM that it is in.

    The command that has started it is what a job of SLURM that is requeued goes on with.

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


def end_with_parent(descriptor: int = 0) -> None:
    """Wait until the other end of standard input is closed, which the system does when the parent is killed, too."""
    while os.read(descriptor, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    from pfl_lightning.cli import main

    main()
