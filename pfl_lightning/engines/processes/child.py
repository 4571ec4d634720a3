"""What a worker process runs: calls come, replies go, until the process that started it closes the line or is gone."""

from __future__ import annotations

import os
import signal
import traceback
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

from pfl_lightning.engines.processes.transport import SharedBytes, receive, send
from pfl_lightning.engines.workers.worker import Worker

__all__ = ["serve"]


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
    threads, path = calls.get()
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
