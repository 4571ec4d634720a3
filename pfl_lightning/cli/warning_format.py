"""How the program ``pfl`` shows the package's own warnings."""

from __future__ import annotations

import logging
import re
from pathlib import Path

__all__ = ["log_warnings_plainly", "without_place"]

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
