"""Lock of a run's folder, which lasts no longer than its process."""

from __future__ import annotations

import os
import socket
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from pfl_lightning.errors import RunLockedError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


LOCK_NAME = ".lock"


class RunLock:
    """Lock of a run's folder while the run is trained: a second process that wants to train it is refused.

    The lock is one of the operating system (``flock``), which drops it when the process ends, however it ends. The file
    ``.lock`` says who holds it; one that a killed process has left has no effect. Evaluations need no lock.

    Args:
        folder: The run's folder, which exists.

    Raises:
        RunLockedError: Another process has locked the folder; names it.
        OSError: The lock's place is taken by a link to another file.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from pfl_lightning.runs.lock import RunLock
        >>> folder = Path(tempfile.mkdtemp())
        >>> with RunLock(folder):
        ...     print([path.name for path in folder.iterdir()])
        ['.lock']
        >>> list(folder.iterdir())
        []
    """

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / LOCK_NAME
        self._descriptor: Any = None  # of the open file, a number
        self.keep()
        HELD.add(self)

    def keep(self) -> None:
        """Lock the folder; again if it, or the file, was removed meanwhile.

        Raises:
            RunLockedError: Another process has locked it.
        """
        if self._is_current():
            return
        while not self._is_current():  # whoever held the file may have removed it in between
            self.close()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Never the file elsewhere to which a link leads: it is overwritten.
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            try:
                if fcntl is None:
                    raise OSError("this system has no flock")
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.read(self._descriptor, 200).decode(errors="replace").strip() or "another process"
                self.close()
                raise RunLockedError(
                    f"the run {self._path.parent} is being trained by {holder}: wait until it ends, or stop it, before "
                    "you resume it, or let this one write to another folder (pfl fit without --ckpt_path does)"
                ) from error
            except OSError as error:  # of a file system without locks
                self.release()
                warnings.warn(
                    f"{self._path.parent} cannot be locked ({error.strerror or error}): make sure that no other "
                    "process trains the same run",
                    stacklevel=4,
                )
                return
        try:
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError:  # a full disk
            self.release()
            raise

    def _is_current(self) -> bool:
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    @property
    def is_held(self) -> bool:
        """Whether there is a lock: some file systems have none."""
        return self._descriptor is not None

    def release(self) -> None:
        """Remove the file and drop the lock; nothing happens the second time."""
        if self._descriptor is not None:
            with suppress(OSError):  # the folder may be gone; an error that ends the run must be seen, not this one
                self._path.unlink()  # before the lock is dropped: nobody else's file
            self.close()

    def close(self) -> None:
        """Drop the lock, and leave the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


HELD: WeakSet[RunLock] = WeakSet()


def wait_for_lock(folder: str | Path) -> RunLock:
    """The lock of a folder that others hold for moments only, such as while they change a file that all write.

    Args:
        folder: The folder, which exists.
    """
    while True:
        try:
            return RunLock(folder)
        except RunLockedError:
            time.sleep(0.05)


def is_locked_here(folder: str | Path) -> bool:
    """Whether this process itself holds the lock of a folder."""
    return bool(_held(folder))


def keep_lock(folder: str | Path) -> None:
    """See that this process still has the lock of a folder, if it has locked it; see :meth:`RunLock.keep`."""
    for lock in _held(folder):
        lock.keep()


def _held(folder: str | Path) -> list[RunLock]:
    return [lock for lock in HELD if lock.is_held and lock._path.parent.resolve() == Path(folder).resolve()]


def _close_all() -> None:
    for lock in HELD:
        lock.close()


# A forked process, such as a data loader's worker, would keep the lock after its parent has been killed.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
