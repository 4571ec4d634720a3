"""What a Trainer does for every fit, and an inner Trainer, of which there is one for each client, at less cost."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.profilers import PassThroughProfiler

__all__ = ["NothingProfiled", "keep_fewer_signals"]

_NOTHING: AbstractContextManager[Any] = nullcontext()


class NothingProfiled(PassThroughProfiler):
    """Times nothing, as Lightning's own, without a generator around each hook of each callback."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """A context that does nothing."""
        return _NOTHING


def keep_fewer_signals(trainer: Any) -> None:
    """Let a Trainer put back the handlers of signals that it may have changed, not of all that there are."""
    connector = trainer._signal_connector
    if hasattr(connector, "_get_current_signal_handlers"):
        connector._get_current_signal_handlers = partial(_handlers, trainer)


def _handlers(trainer: L.Trainer) -> dict[Any, Any]:
    names = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")  # Windows has two of them
    found = {getattr(signal, name) for name in names if hasattr(signal, name)}
    environment = trainer._accelerator_connector.cluster_environment
    requeue = getattr(environment, "requeue_signal", None)  # of a SLURMEnvironment
    return {number: signal.getsignal(number) for number in (found if requeue is None else found | {requeue})}
