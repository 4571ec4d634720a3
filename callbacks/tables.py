"""Tables of a run, as the command line prints them: the clients' architectures, and the results."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Literal, cast

import lightning as L
from rich.console import Console
from rich.table import Table

from pfl_lightning.callbacks.results import ResultsWriter, results_writer
from pfl_lightning.callbacks.run_facts import score_name
from pfl_lightning.data import names_of
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation import Federation
from pfl_lightning.metrics import idle_clients
from pfl_lightning.notices import named_clients
from pfl_lightning.state.architectures import ArchitectureSummary


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

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Print the table."""
        if any(isinstance(callback, L.pytorch.callbacks.ModelSummary) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            title = f"{pl_module.method_name}: {pl_module.num_clients} clients"
            Console().print(architecture_table(pl_module.architectures, title))


def results_table(trainer: L.Trainer) -> str:
    """The table that ``pfl fit`` prints at the end: test accuracies over clients in the rounds that were chosen.

    Args:
        trainer: The Trainer of a fit, with a :class:`~pfl_lightning.callbacks.ResultsWriter`.

    Returns:
        The table as text: ``print(results_table(trainer))``.

    Raises:
        ConfigurationError: The Trainer has no ResultsWriter, or nothing was evaluated.
    """
    writer = results_writer(trainer)
    if writer is None or not writer.chosen:
        raise ConfigurationError("there are no results to show: add a ResultsWriter, and evaluate a round")
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(fit_table(cast(Federation, trainer.lightning_module), writer))
    return cast(io.StringIO, console.file).getvalue()


def fit_table(federation: Federation, writer: ResultsWriter) -> Table:
    """Test accuracies over clients in the rounds that were chosen, in %; without test parts, validation accuracies.

    Further metrics follow, of the last evaluated round. What a method without a head is evaluated by is called a
    nearest-neighbor score. A line below names the clients that no round has trained, whose models are those of the
    beginning.
    """
    some, every = writer.evaluated_clients, federation.num_clients
    clients = f"{every} clients" if some == every else f"{some} of {every} clients"
    part: Literal["test", "validation"] = "test" if writer.summaries("test") else "validation"
    table = Table(title=f"{federation.method_name}: {score_name(federation, part)} over {clients}, in %")
    for column in ("choice", "round", "mean", "std", "worst\ndecile", "best", "worst"):  # 80 columns at most
        table.add_column(column, justify="left" if column == "choice" else "right")
    lines = {choice: (choice, summary) for choice, summary in writer.summaries(part).items()}
    for name, metric in federation.class_metrics.items():
        found = writer.summaries(part, name, metric.lower_is_better)
        lines |= {name: ("last", found["last"])} if "last" in found else {}
    if "best_test" in lines:
        table.title = f"{table.title}\nreport last or validation_selected; best_test looks at test data"
    for shown, (choice, summary) in lines.items():
        figures = (summary.mean, summary.std, summary.worst_decile, summary.best, summary.worst)
        table.add_row(shown, str(writer.chosen[choice].round), *(f"{100 * figure:.2f}" for figure in figures))
    names = names_of(federation.data)
    idle = idle_clients(federation.never_trained, getattr(writer.chosen.get("last"), part, {}), names)
    notes = [f"{idle}: no round drew them, or their updates were left out"] if idle else []
    if names and "last" in lines:
        notes.insert(0, f"worst in the last round: {named_clients([lines['last'][1].worst_client], names)}")
    if notes:
        table.caption, table.caption_justify = "\n".join(notes), "left"
    return table
