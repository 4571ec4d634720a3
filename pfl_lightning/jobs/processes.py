"""Processes of jobs, which end when the command does.

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
from datetime import datetime
from pathlib import Path
from typing import IO

from pfl_lightning.jobs.supervision import GRACE, Job

NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class LocalProcess:
    """A process on this machine, which ends when this one does, however it ends.

    Args:
        job: What it does.
        threads: Threads of its tensor operations.
    """

    def __init__(self, job: Job, threads: int = 1) -> None:
        with opened_log(job) as log:
            self._process = subprocess.Popen(
                job.arguments,
                stdin=subprocess.PIPE,  # never written to: that it closes is what the child waits for
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(threads),
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


# ---------------------------------------------------------------------- inside the process of a job


def end_with_parent(descriptor: int = 0) -> None:
    """Wait until the other end of standard input is closed, which the system does when the parent is killed, too."""
    while os.read(descriptor, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def run_entry(entry: str) -> None:
    """Do the job, whose words are those of ``sys.argv``, and end when the parent does.

    Args:
        entry: ``module:function`` of what it does.
    """
    threading.Thread(target=end_with_parent, daemon=True).start()
    pkgutil.resolve_name(entry)()


if __name__ == "__main__":
    run_entry(sys.argv.pop(1))
