"""Files that are written whole or not at all, and what a full disk is called."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pfl_lightning.errors import DiskFullError, FederationError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space, no quota, larger than files may be."""


def size_text(size: float) -> str:
    """A number of bytes in words.

    Example:
        >>> from pfl_lightning.state.files import size_text
        >>> size_text(512), size_text(20_500_000)
        ('512 B', '20.5 MB')
    """
    power = max((p for p in range(5) if size >= 1000**p), default=0)
    return f"{size / 1000**power:.3g} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


@contextmanager
def explain_full_disk(path: str | Path, partial: Path | None = None) -> Iterator[None]:
    """Inside, an error that means a full disk becomes a :class:`~pfl_lightning.errors.DiskFullError`.

    Args:
        path: What is written.
        partial: File that is written first, whose size says what is needed at least.

    Raises:
        DiskFullError: Names the path, the space that it needs and the space that is free.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = None if isinstance(error, FederationError) else _full(error)  # one that says where already
        if reason is None:
            raise
        size = partial.stat().st_size + 1 if partial and partial.is_file() else 0
        needs = f"it needs {size_text(size)} or more, and " if size else ""
        raise DiskFullError(
            f"{path} cannot be written ({reason}): {needs}{_free(Path(path))}. Files that were there before are "
            "as they were; make room, then resume from the last checkpoint"
        ) from error


@contextmanager
def explain_output() -> Iterator[None]:
    """Inside, an error of writing standard output is called so: it names no file, and would be taken for another's.

    Raises:
        DiskFullError: Standard output cannot be written.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in (*FULL, errno.EPIPE) or not _output_fails():
            raise
        raise DiskFullError(
            f"standard output cannot be written ({error.strerror}): send it elsewhere, or make room there; a run "
            "can be resumed from its last checkpoint"
        ) from error


def _output_fails() -> bool:
    """Whether not even an empty line can be written."""
    try:
        print(flush=True)
    except OSError:
        if sys.stdout is sys.__stdout__:  # what waits would fail once more when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
        return True
    return False


def _full(error: BaseException) -> str | None:
    """Why there is no room; ``None`` for other errors. Torch's writer may hide the error behind one of its own."""
    seen: list[BaseException] = []  # an exception that is raised again and again may be in its own context
    following: BaseException | None = error
    while following is not None and not any(following is one for one in seen):
        if isinstance(following, OSError) and following.errno in FULL:
            return following.strerror or "the disk is full"
        seen.append(following)
        following = following.__cause__ or following.__context__
    return None


def _free(path: Path) -> str:
    for folder in path.absolute().parents:
        with suppress(OSError):
            return f"{size_text(shutil.disk_usage(folder).free)} are free in {folder}"
    return "the free space is unknown"


@contextmanager
def replace_file(path: Path, shared: bool = False, lasting: bool = True) -> Iterator[Path]:
    """Write a file beside its place, and put it there when it is complete: a kill leaves the old file or the new one.

    Args:
        path: The file; its folder is made.
        shared: Whether others may write it at the same time, each to a file of its own; the last one stays.
        lasting: Whether it is to outlast a loss of power, for which one waits for the disk.

    Yields:
        Path to write to.

    Raises:
        DiskFullError: The disk is full; what stood at ``path`` is still there.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from pfl_lightning.state.files import replace_file
        >>> path = Path(tempfile.mkdtemp()) / "results.json"
        >>> with replace_file(path) as temporary:
        ...     written = temporary.write_text("{}")
        >>> [found.name for found in path.parent.iterdir()]
        ['results.json']
    """
    own = f".{os.getpid()}-{threading.get_ident()}" if shared else ""
    temporary = path.with_name(f".{path.name}{own}.tmp")
    try:
        with explain_full_disk(path, temporary):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)  # of a killed process, or a link that would be followed
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            yield temporary
            with temporary.open("rb+") as file:
                if lasting:
                    os.fsync(file.fileno())  # some file systems notice only now that they are full
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
