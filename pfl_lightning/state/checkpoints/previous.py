"""The checkpoint before the last one, which stays until a round has trained from the server of the last one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from pfl_lightning.state.files import replace_file

__all__ = ["PreviousCheckpoints", "previous_of"]

LAST = re.compile(r"last(-v\d+)?\.ckpt")
PREVIOUS = "-previous.ckpt"


def previous_of(path: Path) -> Path:
    """Where the checkpoint before a ``last.ckpt`` is kept.

    Example:
        >>> from pathlib import Path
        >>> from pfl_lightning.state.checkpoints.previous import previous_of
        >>> previous_of(Path("last.ckpt")).name
        'last-previous.ckpt'
    """
    return path.with_name(f"{path.stem}{PREVIOUS}")


class PreviousCheckpoints:
    """Keeps a ``last.ckpt`` that is overwritten as ``last-previous.ckpt`` beside it.

    A server may be finite and no client can train from it, so that a resume would end at once as the run did. Until a
    round from it was aggregated, there is another checkpoint to resume from. It takes the place of the old file on the
    disk (a hard link, where the file system has them) until then.
    """

    def __init__(self) -> None:
        self._untried: set[Path] = set()  # written or loaded, and no round has trained from it
        self._passed_over: set[Path] = set()  # the one before it was loaded

    def keep(self, path: Path) -> None:
        """Called before a checkpoint is written: keep the one in its place if it is good, and there is no other."""
        path = path.absolute()
        if not LAST.fullmatch(path.name):
            return
        if path.is_file() and path not in self._untried | self._passed_over:
            with replace_file(previous_of(path), lambda: path.stat().st_size) as temporary:
                temporary.unlink(missing_ok=True)
                try:
                    os.link(path, temporary)
                except OSError:
                    shutil.copyfile(path, temporary)
        self._passed_over.discard(path)
        self._untried.add(path)

    def loaded(self, path: Path) -> None:
        """Called when a checkpoint is loaded: a fit that resumes from it tries its server."""
        path = path.absolute()
        if path.name.endswith(PREVIOUS):
            self._passed_over.add(path.with_name(f"{path.name.removesuffix(PREVIOUS)}.ckpt"))
        elif LAST.fullmatch(path.name):
            self._untried.add(path)

    def tried(self) -> None:
        """Called when a round was aggregated: remove what was kept in case that there would be none."""
        for path in self._untried:
            previous_of(path).unlink(missing_ok=True)
        self._untried.clear()

    def kept(self) -> Iterator[tuple[Path, Path]]:
        """Checkpoints whose server no round has trained from, each with the one before it."""
        return ((path, previous_of(path)) for path in sorted(self._untried) if previous_of(path).is_file())
