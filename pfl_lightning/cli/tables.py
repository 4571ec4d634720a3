"""The tables that ``pfl methods`` and ``pfl fit`` print."""

from __future__ import annotations

from typing import Literal

from rich.table import Table

from pfl_lightning import methods
from pfl_lightning.callbacks import ResultsWriter
from pfl_lightning.callbacks.run_facts import score_name
from pfl_lightning.encoders import describe_encoders
from pfl_lightning.federation import Federation

__all__ = ["encoders_table", "fit_table", "methods_table"]


def methods_table() -> Table:
    """The methods with paper and year, which weights travel, and whether they train any LightningModule."""
    table = Table(show_lines=True)
    for column in ("method", "year", "paper", "weights that travel", "any module"):
        table.add_column(column)
    for method in (*methods.METHODS, *methods.ADAPTER_METHODS):
        shared = ", ".join(pattern.removesuffix(".*") for pattern in method.shared) or "none"
        paper = method.citation
        text = f"{paper.title} ({paper.authors}, {paper.venue})" if paper else "the baseline without a federation"
        modules = "yes" if method.model_agnostic else "classifiers" if method.feature_based else ""
        table.add_row(method.__name__, str(paper.year) if paper else "", text, shared, modules)
    return table


def encoders_table() -> Table:
    """The registered encoders on small images."""
    table = Table(title="encoders on images of 3 x 32 x 32 (pfl methods --config FILE: those of a run)")
    for column in ("encoder", "class", "features", "parameters"):
        table.add_column(column, justify="left" if column in ("encoder", "class") else "right")
    for row in describe_encoders((3, 32, 32)):
        numbers = (str(row.out_features), f"{row.parameters:,}") if row.parameters else ("-", str(row.reason))
        table.add_row(row.name, row.encoder, *numbers)
    return table


def fit_table(federation: Federation, writer: ResultsWriter) -> Table:
    """Test accuracies over clients in the rounds that were chosen, in %; without test parts, validation accuracies.

    What a method without a head is evaluated by is called a nearest-neighbor score.
    """
    some, every = writer.evaluated_clients, federation.num_clients
    clients = f"{every} clients" if some == every else f"{some} of {every} clients"
    part: Literal["test", "validation"] = "test" if writer.summaries("test") else "validation"
    table = Table(title=f"{federation.method_name}: {score_name(federation, part)} over {clients}, in %")
    for column in ("choice", "round", "mean", "std", "worst decile", "best", "worst"):
        table.add_column(column, justify="left" if column == "choice" else "right")
    for choice, summary in writer.summaries(part).items():
        figures = (summary.mean, summary.std, summary.worst_decile, summary.best, summary.worst)
        table.add_row(choice, str(writer.chosen[choice].round), *(f"{100 * figure:.2f}" for figure in figures))
    return table
