"""The table that ``pfl fit`` prints."""

from __future__ import annotations

from rich.table import Table

from pfl_lightning.callbacks import ResultsWriter
from pfl_lightning.federation import Federation

__all__ = ["fit_table"]


def fit_table(federation: Federation, writer: ResultsWriter) -> Table:
    """Test accuracies over clients in the rounds that were chosen, in %."""
    some, every = writer.evaluated_clients, federation.num_clients
    clients = f"{every} clients" if some == every else f"{some} of {every} clients"
    table = Table(title=f"{federation.method_name}: test accuracy over {clients}, in %")
    for column in ("choice", "round", "mean", "std", "worst decile", "best", "worst"):
        table.add_column(column, justify="left" if column == "choice" else "right")
    for choice, summary in writer.summaries().items():
        figures = (summary.mean, summary.std, summary.worst_decile, summary.best, summary.worst)
        table.add_row(choice, str(writer.chosen[choice].round), *(f"{100 * figure:.2f}" for figure in figures))
    return table
