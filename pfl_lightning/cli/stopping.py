"""Commands that are stopped from outside: signals, exit codes, and how to go on."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pfl_lightning.errors import FederationError
from pfl_lightning.jobs.supervision import handled_signals


@contextmanager
def hangup_as_sigterm() -> Iterator[list[signal.Signals]]:
    """Inside, the end of the terminal (SIGHUP) is passed on as SIGTERM, which Lightning's Trainer handles.

    Yields:
        SIGHUP, as often as it has come.
    """
    came: list[signal.Signals] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        came.append(signal.Signals(number))
        signal.raise_signal(signal.SIGTERM)

    with handled_signals(pass_on, [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []):
        yield came


def stopping_signal(
    error: BaseException, terminated: bool = False, hangups: Sequence[signal.Signals] = ()
) -> signal.Signals | None:
    """The signal that an exit is due to: SIGINT (Ctrl-C), SIGTERM, SIGHUP, or none.

    Lightning ends a fit that is interrupted with exit code 1, and one that is terminated with 0.

    Args:
        error: What ended the command.
        terminated: Whether SIGTERM has come. Sent to all processes of the command, it ends Ray's before this one.
        hangups: What :func:`hangup_as_sigterm` yields. A terminal that is gone cannot be written to, either.
    """
    from lightning.pytorch.utilities.exceptions import SIGTERMException  # a study's commands need no Lightning

    if hangups and isinstance(error, (SIGTERMException, FederationError, OSError)):
        return hangups[0] if getattr(error, "filename", None) is None else None
    if isinstance(error, SIGTERMException) or (terminated and isinstance(error, FederationError)):
        return signal.SIGTERM
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        return signal.SIGINT
    return None


def how_to_go_on(arguments: Sequence[str], last: Path) -> str:
    """The command that resumes a stopped run, or that there is nothing to resume from.

    Args:
        arguments: Words of the stopped command.
        last: Where its last checkpoint is, if it has one.
    """
    if not last.is_file():
        return f"No round was saved in {last.parent.parent}; the same command starts over."
    argv: list[str] = []
    for word in arguments:
        if argv[-1:] == ["--ckpt_path"]:
            argv.pop()
        elif not word.startswith("--ckpt_path="):
            argv.append(word)
    return f"Resume after the last finished round with:\npfl {shlex.join([*argv, '--ckpt_path', str(last)])}"
