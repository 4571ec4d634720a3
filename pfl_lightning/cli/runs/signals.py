"""Signals that stop a command, in the hands of another handler for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["handled_signals"]

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def handled_signals(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals] = STOPPING
) -> Iterator[None]:
    """Inside, signals have another handler, apart from those that are ignored (nohup).

    Args:
        handler: The handler.
        numbers: The signals.
    """
    before: dict[signal.Signals, Any] = {}
    try:
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    except ValueError:  # outside of the main thread, which alone has signals
        before = {}
    try:
        yield
    finally:
        for number, found in before.items():
            signal.signal(number, found)
