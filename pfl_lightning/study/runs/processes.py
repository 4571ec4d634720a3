"""Processes of runs on this machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Protocol

__all__ = ["Command", "LocalStarter", "Process", "Starter", "cores", "has_gpu", "last_lines"]

GRACE = 60.0
"""Seconds that a run has to save itself and end."""


@dataclass(frozen=True)
class Command:
    """A command of ``pfl`` with what its process needs.

    Attributes:
        words: What follows ``pfl``.
        log: The file that gets what it prints; earlier content is kept.
        threads: Threads of its tensor operations.
    """

    words: tuple[str, ...]
    log: Path
    threads: int = 1

    @property
    def arguments(self) -> list[str]:
        """The process's program and arguments."""
        return [sys.executable, "-m", "pfl_lightning.study.runs.child", *self.words]


class Process(Protocol):
    """A run that has been started."""

    def poll(self) -> int | None:
        """Exit code; ``None`` while it runs."""

    def stop(self) -> None:
        """Ask it to save itself and end."""

    def kill(self) -> None:
        """End it at once."""


class Starter(Protocol):
    """Starts runs somewhere."""

    def start(self, command: Command) -> Process:
        """Start a command."""


def environment(threads: int, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a run's process: with its share of threads, and without the job of SLURM that it is in.

    The study itself is what a job that is started again goes on with.

    Args:
        threads: Threads of its tensor operations.
        inherited: The environment that it changes; by default this process's.
    """
    kept = {key: value for key, value in (inherited or os.environ).items() if not key.startswith("SLURM_")}
    return {**kept, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


class LocalProcess:
    """A process on this machine, which ends when this one does, however it ends.

    Args:
        command: What it does.
    """

    def __init__(self, command: Command) -> None:
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with open(command.log, "ab", opener=_no_link) as log:
            _head(log, command)
            self._process = subprocess.Popen(
                command.arguments,
                stdin=subprocess.PIPE,  # never written to: that it closes is what the child waits for
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(command.threads),
                # Ctrl-C in a terminal reaches the study alone, which stops its runs in order.
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
            return self._wait()
        except BaseException:
            self.stop()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
            raise
        finally:
            self.poll()

    def _wait(self) -> int:
        """Wait in small steps: Ray interrupts a task without a signal, which would not wake it from a long one."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(1.0)


class LocalStarter:
    """Starts runs as processes on this machine."""

    def start(self, command: Command) -> LocalProcess:
        """Start a command."""
        return LocalProcess(command)


def _head(log: IO[bytes], command: Command) -> None:
    log.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S} pfl {shlex.join(command.words)}\n".encode())
    log.flush()


def end_all(processes: Sequence[Process], grace: float = GRACE) -> None:
    """Let processes save themselves and end; those that take longer are killed, as all are at a second Ctrl-C.

    Args:
        processes: The processes.
        grace: Seconds that they have.
    """
    try:
        for process in processes:
            process.stop()
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_gpu() -> bool:
    """Whether this machine has an accelerator that runs would share."""
    import torch

    return torch.cuda.is_available()


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
