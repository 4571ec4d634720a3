"""Values that callbacks watch and a run does not have, since its method trains a module without the module's steps."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Any

from pfl_lightning.errors import ConfigurationError

__all__ = ["refuse_watched", "warn_of_monitor", "what_to_watch"]

_OF_A_RUN = re.compile(r"(novel_)?(val_|test_)accuracy\b|train/|(round|client|loss|epoch|step)$")
"""Names that a federation itself logs."""

_PACKAGES = ("lightning.", "pytorch_lightning.", "pfl_lightning.")


def refuse_watched(outside: Iterable[Any], inside: Iterable[Any], module: str, method: str) -> None:
    """Refuse callbacks that watch what the module's own steps would log, before a round is trained.

    Where a callback of the user's own is among them, which may log a value under any name, nothing is refused.

    Args:
        outside: Callbacks of the outer Trainer.
        inside: Callbacks of local fits, where nothing of the federation's is logged.
        module: Name of the module's class.
        method: Name of the method.

    Raises:
        ConfigurationError: Names the callback, and what it may watch.
    """
    for callbacks, known in ((list(outside), _OF_A_RUN), (list(inside), None)):
        if not all(f"{type(each).__module__}.".startswith(_PACKAGES) for each in callbacks):
            continue
        for each in callbacks:
            monitor = getattr(each, "monitor", None)
            if isinstance(monitor, str) and not (known is not None and known.match(monitor)):
                raise ConfigurationError(
                    what_to_watch(f"{type(each).__name__} watches {monitor!r}", module, method, "leave it out")
                )


def warn_of_monitor(monitor: str | None, module: str, method: str) -> None:
    """Warn that rounds do not have the value that is asked for over clients; a test after a personalization has it.

    Args:
        monitor: The value; ``None`` for none.
        module: Name of the module's class.
        method: Name of the method.
    """
    if monitor is not None and not _OF_A_RUN.match(monitor):
        warnings.warn(
            f"monitor={monitor!r} names what {module}'s own steps log, and they do not run while {method} trains it by "
            f"an objective of its own: rounds have no {monitor}/mean, but val_accuracy/mean. Leave it out, unless "
            "tests after a personalization are to have it",
            stacklevel=2,
        )


def what_to_watch(what: str, module: str, method: str, instead: str) -> str:
    """The sentence about something that watches what the module's own steps would log."""
    return (
        f"{what}, and what {module}'s own steps log (train_loss, val_loss) is not there while {method} trains it by an "
        f"objective of its own: {instead}, or let a callback of the outer Trainer watch train/self_supervised or "
        "val_accuracy/mean (mode='max')"
    )
