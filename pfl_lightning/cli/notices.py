"""What Lightning says of the machine, after what is wrong with the command."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L

__all__ = ["Notices"]

LOGGERS = tuple(
    f"{package}.utilities.{module}"
    for package in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
    for module in ("rank_zero", "seed")
)
"""Lightning's loggers, under each of its names: every Trainer uses that of the package that was imported last."""


class Notices(L.Callback):
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

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Data and models are made: the work begins."""
        self.release()

    on_validation_start = on_test_start = on_fit_start

    def _take(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.INFO:
            return True
        self._held.append(record)
        return False

    def _stop(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self._take)
