"""Jobs in copies of one process that has imported everything: each starts in a moment.

``python -m pfl_lightning.jobs.warm HANDLE MODULES`` is that process, the template. It touches no GPU, runs no thread,
and copies itself (fork) for each job that comes over the socket HANDLE; a watcher, another copy, says how each has
ended. All of them end when the process does that has started the template.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

from pfl_lightning.cli.main import uncollected, wait_passively
from pfl_lightning.jobs.processes import LocalProcess, environment, opened_log, run_entry
from pfl_lightning.jobs.supervision import Job, Starter, how_it_ended

PRELOADED = (
    *("pfl_lightning.cli.federated_cli:prepare", "pfl_lightning.study.callbacks", "pfl_lightning.study.check"),
    *("torch.utils.tensorboard", "sklearn.datasets", "omegaconf"),
)
"""What the template imports, or calls: the package, and what most runs import later of others, where installed."""

MOST = 1 << 16
"""Bytes of a job's words."""


def local_starter(threads: int) -> Starter:
    """Starts jobs on this machine: in copies of a warm process, where the system has them and they are safe.

    Args:
        threads: Threads of the tensor operations of each.
    """
    warm = hasattr(os, "fork") and sys.platform != "darwin"
    return WarmStarter(threads) if warm else partial(LocalProcess, threads=threads)


class WarmStarter:
    """Starts jobs in copies of a template, which is started with the first.

    Args:
        threads: Threads of the tensor operations of each, which are set when the template imports torch.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._template: Template | None = None

    def __call__(self, job: Job) -> ForkedProcess:
        """Start a job."""
        if self._template is None or self._template.process.poll() is not None:
            self._template = Template(self._threads)
        return ForkedProcess(job, self._template)


class Template:
    """The process that is copied, as the process that has started it sees it.

    Args:
        threads: Threads of tensor operations.
    """

    def __init__(self, threads: int) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  # what it prints; each log begins with it
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *PRELOADED],
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                env=environment(threads),
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C in a terminal does not reach it
            )

    def how_it_ended(self) -> tuple[int, bytes]:
        """Its exit code, and what a log says of that: what the template printed, and a sentence."""
        try:
            code = self.process.wait(1)  # it has closed its files a moment before it ends
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        self.output.seek(0)
        sentence = f"pfl: this could not be started: the process that starts runs {how_it_ended(code)}\n"
        return code, self.output.read() + sentence.encode()


class ForkedProcess:
    """A job in a copy of the template, which ends when this process does, however it ends.

    Args:
        job: What it does.
        template: What is copied.
    """

    def __init__(self, job: Job, template: Template) -> None:
        self._job, self._template = job, template
        self._said = b""  # the number of the copy and its exit code, as its watcher writes them
        self._code: int | None = None
        theirs, life = os.pipe()
        self._life = open(life, "wb")  # noqa: SIM115  # never written to: that it closes is what the copy waits for
        self._status, writes = os.pipe()
        os.set_blocking(self._status, False)
        words = json.dumps([job.entry, *job.argv]).encode()
        with opened_log(job) as log, suppress(OSError):  # where the template has ended, poll finds it so
            socket.send_fds(template.socket, [words], [theirs, log.fileno(), writes])
        os.close(theirs)
        os.close(writes)

    def poll(self) -> int | None:
        """Exit code; ``None`` while it runs."""
        if self._code is None:
            with suppress(BlockingIOError):
                while found := os.read(self._status, 64):
                    self._said += found
                self._note_end()
        return self._code

    def _note_end(self) -> None:
        """Nobody is left who could say more: the watcher has ended, or the template, before it had taken the job."""
        number, _, code = self._said.decode().partition(" ")
        self._code = int(code or -signal.SIGKILL)
        if not number:
            self._code, why = self._template.how_it_ended()
            with opened_log(self._job) as log:
                log.write(why)
        self.stop()
        os.close(self._status)

    def stop(self) -> None:
        """Ask it to save itself and end."""
        self._life.close()

    def kill(self) -> None:
        """End it at once."""
        number = self._said.partition(b" ")[0] if self.poll() is None else b""
        if number:
            os.kill(int(number), signal.SIGKILL)
        else:  # it ends as soon as it is copied
            self.stop()


# ---------------------------------------------------------------------- inside the template


def serve(connection: socket.socket) -> list[str]:
    """Copy this process for each job that comes.

    Args:
        connection: Gives each job's words, with its standard input, its log and where its watcher writes.

    Returns:
        In each copy, the entry and the words of its job; in the template never.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for watchers
    while True:
        words, handles, _, _ = socket.recv_fds(connection, MOST, 3)
        if not words:  # who has started the template has ended
            os._exit(0)
        if os.fork() == 0:
            break
        for handle in handles:
            os.close(handle)
    connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    life, log, status = handles
    if (copy := os.fork()) > 0:
        with suppress(OSError):
            os.write(status, b"%d " % copy)
            os.write(status, b"%d" % os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))
        os.close(status)  # a moment before this process has given its memory back
        os._exit(0)
    os.close(status)
    os.setpgid(0, 0)
    os.write(log, os.pread(1, MOST, 0))  # what the imports have said
    for place, handle in enumerate((life, log, log)):
        os.dup2(handle, place)
    return [str(word) for word in json.loads(words)]


def preload(names: list[str]) -> None:
    """Import modules, and call functions (``module:function``); copies share the memory of what is there then."""
    with uncollected():
        for name in names:
            with suppress(ModuleNotFoundError):
                found = pkgutil.resolve_name(name)
                found() if callable(found) else None
    gc.freeze()


def main() -> None:
    """The template, and each of its copies after that."""
    handle, *names = sys.argv[1:]
    del sys.argv[1:]  # no words of a command
    wait_passively()
    preload(names)
    entry, *argv = serve(socket.socket(fileno=int(handle)))
    for end in weakref.finalize._registry:  # type: ignore[attr-defined]  # of imports: hundreds, and the template's
        end.atexit = False
    importlib.invalidate_caches()
    if "numpy" in sys.modules:  # torch has a fixed seed where none is given, Python draws another one in each copy
        sys.modules["numpy"].random.seed()
    sys.argv[1:] = argv
    os._exit(exit_code_of(entry))


def exit_code_of(entry: str) -> int:
    """Do a job and end as Python does, but for taking all modules apart: that takes longer than to copy them.

    Args:
        entry: ``module:function`` of what it does.

    Returns:
        The exit code.
    """
    code: Any = 0
    try:
        run_entry(entry)
    except SystemExit as ended:
        code = 0 if ended.code is None else ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as multiprocessing does, too
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code)


if __name__ == "__main__":
    main()
