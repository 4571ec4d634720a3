"""Runs of the command line in processes of their own, one of whose file operations is their last."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
LIMIT = 240
"""Seconds after which a process that hangs is ended."""


def run_in_process(arguments: Sequence[str], folder: Path, kill_at: int | None = None) -> tuple[int, list[str]]:
    """Run a command in a new process.

    Args:
        arguments: Words of the command.
        folder: Operations on files in it count: opening for writing, making and removing, renaming.
        kill_at: Number of the operation before which the process is killed, from 0; ``None`` for none.

    Returns:
        The exit code, negative for a signal, and the operations that were begun.
    """
    context = multiprocessing.get_context("forkserver")  # forks of a process without threads: a fit needs them whole
    context.set_forkserver_preload(["pfl_lightning.cli", "_helpers.kill_at"])
    log = folder.parent / f"{folder.name}.operations"
    log.unlink(missing_ok=True)
    process = context.Process(target=_run, args=(list(arguments), str(folder), str(log), kill_at))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode, log.read_text().splitlines() if log.exists() else []


def _run(arguments: list[str], folder: str, log: str, kill_at: int | None) -> None:
    import warnings

    import torch

    signal.alarm(LIMIT)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = Path(f"{log}.output").open("a")  # noqa: SIM115
    from pfl_lightning.cli import main

    record, count = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 0

    def watch(event: str, values: tuple[Any, ...]) -> None:
        nonlocal count
        operation = _operation(event, values, folder)
        if operation is None:
            return
        os.write(record, f"{operation}\n".encode())
        count += 1
        if kill_at is not None and count > kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    main(arguments)


def _operation(event: str, values: tuple[Any, ...], folder: str) -> str | None:
    """An operation that changes files in a folder, in words; ``None`` for everything else."""
    if event == "open" and not (isinstance(values[2], int) and values[2] & WRITING):
        return None
    if event not in ("open", "os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.truncate", "os.link", "os.symlink"):
        return None
    paths = [os.fspath(value) for value in values[:2] if isinstance(value, str | os.PathLike)]
    inside = [path for path in map(str, paths) if path.startswith(folder)]
    return f"{event} {' '.join(os.path.relpath(path, folder) for path in inside)}" if inside else None
