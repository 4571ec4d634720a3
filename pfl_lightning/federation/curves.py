"""Curves of a resumed run in TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger

__all__ = ["purge_curves"]


def purge_curves(loggers: Iterable[Logger], step: int) -> None:
    """Let TensorBoard forget what earlier files of the folder say about a step and later ones.

    ``SummaryWriter(purge_step=...)`` writes the same mark, but when the logger is made the step is not known yet.

    Args:
        loggers: Loggers, of which those of TensorBoard are marked.
        step: The first step that is logged again.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            writer: Any = logger.experiment
            writer.purge_step = step
            writer.close()  # the next event opens a file that begins with the mark
