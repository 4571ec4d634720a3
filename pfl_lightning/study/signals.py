"""Signals that stop a study: Ctrl-C, SIGTERM, and the end of its terminal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

__all__ = ["StoppedError", "noted_signals", "stopping_signals"]

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class StoppedError(BaseException):
    """A signal has come while no run was being played.

    Args:
        number: The signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Stoppable(Protocol):
    """What a signal stops.

    Attributes:
        stopped: The signal that has come.
    """

    stopped: signal.Signals | None


@contextmanager
def stopping_signals() -> Iterator[None]:
    """Inside, a signal that stops raises a :class:`StoppedError`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedError(signal.Signals(number))

    with _handled(stop):
        yield


@contextmanager
def noted_signals(outcome: Stoppable) -> Iterator[None]:
    """Inside, a first signal that stops is noted, and a second one interrupts what is being done.

    Args:
        outcome: Where it is noted.
    """

    def note(number: int, frame: FrameType | None) -> None:
        if outcome.stopped is not None:
            raise StoppedError(signal.Signals(number))
        outcome.stopped = signal.Signals(number)

    with _handled(note):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, the signals have another handler, apart from those that are ignored (nohup)."""
    before: dict[signal.Signals, Any] = {}
    try:
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    except ValueError:  # outside of the main thread, which alone has signals
        before = {}
    try:
        yield
    finally:
        for number, found in before.items():
            signal.signal(number, found)
