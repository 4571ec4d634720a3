"""What jobs of tests do, in processes of their own."""

import atexit
import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path


def exits() -> None:
    """With the exit code of the command line, or a sentence."""
    sys.exit(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1])


def fails() -> None:
    raise RuntimeError(sys.argv[1])


def kills_itself() -> None:
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])


def waits() -> None:
    """Until it is asked to end: it saves itself in a file then. Its number is written when it is ready to."""

    def save(number: int, frame: object) -> None:
        Path(sys.argv[1]).write_text("saved")
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, save)
    print(os.getpid(), flush=True)
    while True:  # a signal that comes just before a long sleep would not end it
        time.sleep(0.1)


def says_where() -> None:
    """What its process has of its surroundings."""
    atexit.register(print, "at its exit")
    threading.Thread(target=lambda: (time.sleep(0.1), print("a thread's end"))).start()
    print([os.getcwd(), os.environ["OMP_NUM_THREADS"], "SLURM_JOB_ID" in os.environ, sys.argv[1:]])
    print([os.getpgid(0) == os.getpid(), sys.stdin.read(0), signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL])


def draws() -> None:
    """A random number of numpy, which nobody has seeded."""
    import numpy as np

    print(np.random.random())  # noqa: NPY002


def imports() -> None:
    """A module of the user's."""
    print(importlib.import_module(sys.argv[1]).VALUE)
