"""The tables that ``pfl methods`` prints."""

from __future__ import annotations

from rich.table import Table

from pfl_lightning import methods
from pfl_lightning.encoders import describe_encoders

__all__ = ["encoders_table", "methods_table"]


def methods_table() -> Table:
    """The methods with paper and year, which weights travel, and whether they train any LightningModule."""
    table = Table(show_lines=True)
    for column in ("method", "year", "paper", "weights that travel", "any module"):
        table.add_column(column)
    for method in methods.METHODS:
        shared = ", ".join(pattern.removesuffix(".*") for pattern in method.shared) or "none"
        paper = method.citation
        text = f"{paper.title} ({paper.authors}, {paper.venue})" if paper else "the baseline without a federation"
        table.add_row(
            method.__name__, str(paper.year) if paper else "", text, shared, "yes" if method.needs == "step" else ""
        )
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
