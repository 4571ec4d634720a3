"""Jobs that run at once, and what ends them: their own end, a signal, or the end of the command."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

GRACE = 60.0
"""Seconds that a job has to save itself and end."""

POLL = 0.01
"""Seconds between looks at the processes."""

AGAIN = 1.0
"""Seconds until jobs are asked for again when there was none that could be started, unless one ends before."""


@dataclass(frozen=True)
class Job:
    """A command of ``pfl`` with what its process needs.

    Attributes:
        argv: What follows ``pfl``.
        log: The file that gets what it prints; earlier content is kept.
        entry: ``module:function`` that its process calls.
    """

    argv: tuple[str, ...]
    log: Path
    entry: str = "pfl_lightning.cli.main:main"

    @property
    def arguments(self) -> list[str]:
        """The process's program and arguments."""
        return [sys.executable, "-m", "pfl_lightning.jobs.processes", self.entry, *self.argv]


Ended = tuple[Job, int]
"""A job whose process has ended, and its exit code; below 0 for the signal that ended it."""


class Process(Protocol):
    """A job that has been started."""

    def poll(self) -> int | None:
        """Exit code; ``None`` while it runs."""

    def stop(self) -> None:
        """Ask it to save itself and end."""

    def kill(self) -> None:
        """End it at once."""


Starter = Callable[[Job], Process]
"""Starts a job somewhere."""


class StoppedError(KeyboardInterrupt):
    """A signal has come that stops the command.

    Args:
        number: The signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Jobs:
    """Supervises jobs until none is left or a signal comes, at which those that run save themselves and end.

    Args:
        starter: Starts their processes.
        at_once: How many run at once.
    """

    def __init__(self, starter: Starter, at_once: int = 1) -> None:
        self.starter = starter
        self.at_once = at_once
        self._stopped: signal.Signals | None = None
        self._running: dict[Job, Process] = {}
        self._deadlines: dict[Job, float] = {}  # of jobs that were asked to end
        self._ask = 0.0  # when jobs are asked for again

    def run(self, jobs: Iterator[Job | None]) -> Generator[Ended | None, None, None]:
        """Run jobs; close this iterator to end those that run.

        Args:
            jobs: Gives the next job whenever there is room for one; ``None`` while none can be started.

        Yields:
            Each job that has ended, and ``None`` after each look at the processes.

        Raises:
            StoppedError: A signal has come, and what ran has ended. A second one kills what runs.
        """
        with handled_signals(self._note_signal):
            try:
                while self._stopped is None and self._fill(jobs):
                    yield from (ended := self._ended())
                    yield None
                    time.sleep(0 if ended else POLL)
            finally:
                self._end_all()
        if self._stopped is not None:
            raise StoppedError(self._stopped)

    def end(self, job: Job) -> None:
        """Ask a job to save itself and end; it is killed if it takes longer than its time of grace."""
        self._running[job].stop()
        self._deadlines[job] = time.monotonic() + GRACE

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stopped is not None:
            raise StoppedError(signal.Signals(number))
        self._stopped = signal.Signals(number)

    def _fill(self, jobs: Iterator[Job | None]) -> bool:
        """Start as many jobs as there is room for; whether any runs, or may come."""
        while len(self._running) < self.at_once and time.monotonic() >= self._ask:
            try:
                job = next(jobs)
            except StopIteration:
                return bool(self._running)
            if job is None:
                self._ask = time.monotonic() + AGAIN
            else:
                self._running[job] = self.starter(job)
        return True

    def _ended(self) -> list[Ended]:
        """Jobs that have ended since the last look."""
        for job, deadline in self._deadlines.items():
            if time.monotonic() > deadline:
                self._running[job].kill()
        found = [(job, code) for job, process in self._running.items() if (code := process.poll()) is not None]
        for job, _ in found:
            del self._running[job]
            self._deadlines.pop(job, None)
            self._ask = 0.0
        return found

    def _end_all(self) -> None:
        """Let all that runs save itself and end; what takes longer is killed, as all is at a second signal."""
        running, self._running = list(self._running.values()), {}
        try:
            for process in running:
                process.stop()
            deadline = time.monotonic() + GRACE
            while time.monotonic() < deadline and any(process.poll() is None for process in running):
                time.sleep(POLL)
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()


STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def handled_signals(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals] = STOPPING
) -> Iterator[None]:
    """Inside, signals have another handler, apart from those that are ignored (nohup).

    Args:
        handler: The handler.
        numbers: The signals.
    """
    before: dict[signal.Signals, Any] = {}
    try:
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    except ValueError:  # outside of the main thread, which alone has signals
        before = {}
    try:
        yield
    finally:
        for number, found in before.items():
            signal.signal(number, found)


def how_it_ended(code: int) -> str:
    """What an exit code means.

    Args:
        code: Exit code of a process; below 0 for the signal that ended it.

    Example:
        >>> how_it_ended(1), how_it_ended(-11)
        ('failed with exit code 1', 'ended by SIGSEGV')
    """
    if code >= 0:
        return f"failed with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"ended by {name}" + (", perhaps out of memory" if name == "SIGKILL" else "")
