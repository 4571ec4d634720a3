"""How ``pfl`` shows the package's own warnings."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path

__all__ = ["show_own_warnings_plainly"]

PACKAGE = Path(__file__).parent.parent


def show_own_warnings_plainly() -> None:
    """Print the package's warnings as sentences, without the line of code that gave them; others stay as they are.

    Lightning sets a format of its own when it is imported, so that this is called again after that.
    """
    if getattr(warnings.formatwarning, "func", None) is not _format:
        warnings.formatwarning = functools.partial(_format, warnings.formatwarning)


def _format(
    others: Callable[..., str],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    if issubclass(category, UserWarning) and PACKAGE in Path(filename).parents:
        return f"pfl: warning: {message}\n"
    return others(message, category, filename, lineno, line)
