"""What the program shows of others: Lightning's notices once the work begins, and warnings as sentences."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Notices", "log_warnings_plainly", "without_place"]

LOGGERS = tuple(
    f"{package}.utilities.{module}"
    for package in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
    for module in ("rank_zero", "seed")
)
"""Lightning's loggers, under each of its names: every Trainer uses that of the package that was imported last."""


class Notices:
    """Holds Lightning's notices back (seed, GPUs, TPUs) until a command's work begins.

    A command that is refused before says why, and nothing else. Warnings are not held back.
    """

    def __init__(self) -> None:
        self._held: list[logging.LogRecord] = []

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Inside, notices wait for :meth:`release`; those that still wait when an error ends it are dropped."""
        for name in LOGGERS:
            logging.getLogger(name).addFilter(self._take)
        try:
            yield
            self.release()
        finally:
            self._stop()

    def release(self) -> None:
        """Let them out, and hold back none from now on."""
        self._stop()
        held, self._held = self._held, []
        for record in held:
            logging.getLogger(record.name).handle(record)

    def _take(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.INFO:
            return True
        self._held.append(record)
        return False

    def _stop(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self._take)


PACKAGE = Path(__file__).parent.parent
OWN = re.compile(rf"{re.escape(str(PACKAGE))}/\S+\.py:\d+: UserWarning: ")
"""How Python begins a warning of the package; a line of code follows the message."""


def log_warnings_plainly() -> None:
    """Send warnings to Python's log of warnings, which prints the package's as sentences and others as they are.

    For a process that is ``pfl`` and nothing else: a program that calls ``main`` sees warnings as ever.
    """
    logger, handler = logging.getLogger("py.warnings"), logging.StreamHandler()
    handler.terminator = ""  # a warning ends with one
    handler.setFormatter(_Plain())
    logger.addHandler(handler)
    logger.propagate = False
    logging.captureWarnings(True)


def without_place(text: str) -> str:
    """A warning as Python formats it; of the package's own, the message alone.

    Args:
        text: The warning, with the place that gave it and the line of code.
    """
    own = OWN.match(text)
    if own is None:
        return text
    message = re.sub(r"\n  \S.*\n$", "", text[own.end() :])
    return f"pfl: warning: {message.rstrip()}\n"


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return without_place(record.getMessage())
