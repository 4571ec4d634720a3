"""A table of the clients' architectures at the start of a run."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
from rich.console import Console
from rich.table import Table

from pfl_lightning.federation import Federation
from pfl_lightning.state.architectures import ArchitectureSummary

__all__ = ["ArchitectureTable", "architecture_table"]


def architecture_table(rows: Sequence[ArchitectureSummary], title: str | None = None) -> Table:
    """Table with one row per architecture: encoder, feature width, parameters, shared weights, number of clients.

    Args:
        rows: Summary of each architecture.
        title: Title of the table; None for none.

    Returns:
        The table, to be printed by rich.
    """
    table = Table(title=title)
    table.add_column("encoder")
    for column in ("features", "parameters", "shared weights", "clients"):
        table.add_column(column, justify="right")
    for row in rows:
        features = "-" if row.features is None else str(row.features)
        table.add_row(row.encoder, features, f"{row.parameters:,}", f"{row.shared:,}", str(row.clients))
    return table


class ArchitectureTable(L.Callback):
    """Callback that prints a table of the clients' architectures when training starts.

    Nothing is printed if the Trainer's ``enable_model_summary`` is false.
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table."""
        assert isinstance(pl_module, Federation)
        if any(isinstance(callback, L.pytorch.callbacks.ModelSummary) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            title = f"{pl_module.method_name}: {pl_module.num_clients} clients"
            Console().print(architecture_table(pl_module.architectures, title))
