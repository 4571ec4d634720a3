"""What a folder that cannot be written is called, before a study or in its middle."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pfl_lightning.errors import ConfigurationError, DiskFullError
from pfl_lightning.state.files import explain_full_disk, file_below

__all__ = ["explain_unwritable"]

FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP)
"""A read-only disk, no rights, places in which no folder can be, and a link in the place of a file."""

GO_ON = "the same command then goes on with what was saved"


@contextmanager
def explain_unwritable(output: Path) -> Iterator[None]:
    """Inside, an error of writing to a study's folder says which folder, why, and what to do.

    Args:
        output: The folder.

    Raises:
        DiskFullError: The disk is full.
        ConfigurationError: The folder cannot be written.
    """
    try:
        with explain_full_disk(output):
            yield
    except DiskFullError as error:
        error.add_note(GO_ON)
        raise
    except OSError as error:
        if error.errno not in FORBIDDEN or file_below(error, output) is None:
            raise
        raise ConfigurationError(
            f"the study's folder {output} cannot be written ({error.strerror}: {error.filename}): give another "
            f"--output, or make it a folder that may be written; {GO_ON}"
        ) from error
