"""Worker processes that are forks of the test's own, which start in no time."""

import os
import signal
import time
import warnings

from pfl_lightning import ProcessEngine
from pfl_lightning.engines.workers import engine as worker_engine
from pfl_lightning.engines.workers import processes as host
from pfl_lightning.engines.workers.processes import serve


class Fork:
    """Enough of ``subprocess.Popen``."""

    def __init__(self, handle):
        self.code = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which wait here
            self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            try:
                serve(handle)
            finally:
                os._exit(1)

    def poll(self):
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, timeout=30.0):
        end = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        return self.code


def forked_process_engine(monkeypatch, workers=2, **options):
    """A ProcessEngine with real processes that need not import torch; it sends the smallest tensor once."""
    monkeypatch.setattr(worker_engine, "WORTH_SHARING", 0)
    monkeypatch.setattr(host, "launch", Fork)
    return ProcessEngine(workers=workers, **options)


def ends(process, seconds=60.0):
    """Whether a process ends by itself in time; it is ended in any case."""
    try:
        process.wait(seconds)
        return process.poll() is not None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
