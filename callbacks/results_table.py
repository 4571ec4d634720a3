"""The table of a run's results, in Python."""

from __future__ import annotations

import io
from typing import cast

import lightning as L
from rich.console import Console

from pfl_lightning.callbacks.results import ResultsWriter
from pfl_lightning.errors import ConfigurationError

__all__ = ["results_table"]


def results_table(trainer: L.Trainer) -> str:
    """The table that ``pfl fit`` prints at the end: test accuracies over clients in the rounds that were chosen.

    Args:
        trainer: The Trainer of a fit, with a :class:`~pfl_lightning.callbacks.ResultsWriter`.

    Returns:
        The table as text: ``print(results_table(trainer))``.

    Raises:
        ConfigurationError: The Trainer has no ResultsWriter, or nothing was evaluated.
    """
    from pfl_lightning.cli.tables import fit_table  # the command line builds on the callbacks
    from pfl_lightning.federation import Federation

    callbacks = cast(list[L.Callback], trainer.callbacks)  # type: ignore[attr-defined]
    writer = next((callback for callback in callbacks if isinstance(callback, ResultsWriter)), None)
    if writer is None or not writer.chosen:
        lacks = "has no ResultsWriter among its callbacks" if writer is None else "has evaluated no round yet"
        raise ConfigurationError(f"there are no results to show: the Trainer {lacks}")
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(fit_table(cast(Federation, trainer.lightning_module), writer))
    return cast(io.StringIO, console.file).getvalue()
