"""Signals that stop a study: Ctrl-C, SIGTERM, and the end of its terminal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from pfl_lightning.cli.runs.signals import handled_signals

__all__ = ["StoppedError", "noted_signals", "stopping_signals"]


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

    with handled_signals(stop):
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

    with handled_signals(note):
        yield
