"""``pfl methods``: what a config can name, as two files list it, so that no import of torch is needed.

``catalog.json`` is written by ``benchmarks/method_catalog.py``, ``costs.json`` by ``benchmarks/method_costs.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pfl_lightning.cli.commands import WordParser
from pfl_lightning.errors import UsageError
from pfl_lightning.names import did_you_mean

CATALOG, COSTS = (Path(__file__).with_name(f"{name}.json") for name in ("catalog", "costs"))
"""What classes say of methods, objectives and encoders; what methods cost and serve, as it was measured."""

MODULES = {
    "yes": "any",
    "classifiers": "any that classifies",
    "adapters": "those with low-rank adapters",
    "": "the package's own",
}
"""What the last column means."""

NEEDS = {
    "features": "features in front of a head",
    "adapters": "low-rank adapters in the model",
    "public data": "public samples (the data module's public=...)",
    "validation": "a validation part of every client (validation_share)",
    "equal encoders": "equal encoders",
    "one width": "features of one width",
    "partner": "a second network: like the client's own or, where encoders differ, its partner=, the same for all",
}
"""What a method may need of models and data, and what that means."""

BETTER_THAN_CHANCE = 0.3
"""Accuracy, of ten classes, from which clients that never trained count as served."""

FILTERS: dict[str, Callable[[MethodRow], bool]] = {
    "--heterogeneous": lambda row: row.costs is not None and row.costs.unequal_encoders,
    "--novel": lambda row: row.costs is not None and row.costs.novel_accuracy >= BETTER_THAN_CHANCE,
    "--public": lambda row: "public data" in row.needs,
    "--any-module": lambda row: row.modules == "yes",
    "--classifiers": lambda row: row.modules in ("yes", "classifiers"),
}
"""Which methods fit."""

HELP = {
    "--heterogeneous": "methods in which clients' encoders may differ",
    "--novel": "methods that also serve clients that never trained",
    "--public": "methods in which clients learn from public samples",
    "--any-module": "methods that train any LightningModule",
    "--classifiers": "these, and methods that train any module that classifies",
}
"""Help on filters."""


@dataclass(frozen=True)
class MethodCosts:
    """Measured costs of a method; ratios are to FedAvg with the same settings.

    Attributes:
        method: Name of the class.
        down: What the server sends a client: modules of the model, and fields beside them.
        up: What a client sends.
        down_bytes: Bytes to a client in a round.
        up_bytes: Bytes from a client in a round.
        client_bytes: Bytes that are stored of a client from round to round.
        server_bytes: Bytes of the server's state.
        server_bytes_per_client: Bytes that the server keeps of each client beside it.
        work: Operations of a round's forward and backward passes, as a ratio.
        time: Time of a round, as a ratio; ``None`` where it was not measured.
        overhead: Time of a round over that of its passes in a plain loop, or ``None``.
        overhead_long: The same where a client takes more steps: FedPAC's 600 images and 5 epochs, or ``None``.
        unequal_encoders: Whether two encoders of one feature width train together.
        novel_accuracy: Test accuracy in [0, 1] of clients that never train, on ten classes, after ten rounds at one
            rate for all methods, without a personalization.
        measured: Day and machine.
    """

    method: str
    down: list[str]
    up: list[str]
    down_bytes: int
    up_bytes: int
    client_bytes: int
    server_bytes: int
    server_bytes_per_client: int
    work: float
    time: float | None
    overhead: float | None
    unequal_encoders: bool
    novel_accuracy: float
    measured: str = ""
    overhead_long: float | None = None


@dataclass(frozen=True)
class MethodRow:
    """What the table knows of a method.

    Attributes:
        name: Name of the class.
        year: Year of its paper; empty for a baseline without one.
        paper: Title, authors and venue.
        shared: Weights that are averaged.
        modules: Which LightningModules it trains, a key of :data:`MODULES`.
        needs: What it needs of models and data.
        costs: What was measured; ``None`` if nothing was.
    """

    name: str
    year: str
    paper: str
    shared: str
    modules: str
    needs: tuple[str, ...]
    costs: MethodCosts | None


def read_catalog() -> dict[str, list[list[str]]]:
    """The rows of the catalog: of methods, objectives and encoders."""
    found: dict[str, list[list[str]]] = json.loads(CATALOG.read_text())
    return found


def read_costs() -> dict[str, MethodCosts]:
    """The measured methods by name."""
    rows = json.loads(COSTS.read_text())["rows"] if COSTS.is_file() else []
    return {row["method"]: MethodCosts(**row) for row in rows}


def method_rows() -> list[MethodRow]:
    """The methods of the catalog with what was measured of them: whether encoders must be equal, too."""
    measured, rows = read_costs(), list[MethodRow]()
    for name, year, paper, shared, modules, needed in read_catalog()["methods"]:
        costs, needs = measured.get(name), [need for need in needed.split(", ") if need]
        needs += ["equal encoders"] if costs is not None and not costs.unequal_encoders else []
        rows.append(MethodRow(name, year, paper, shared, modules, tuple(needs), costs))
    return rows


def methods_table(rows: Sequence[MethodRow]) -> Table:
    """What travels, what stays, whom a method can serve, and what it costs beside FedAvg."""
    headings = ("method", "weights that travel", "bytes", "time", "work", "needs", "novel", "any module")
    cells, baseline = list[Sequence[str]](), read_costs().get("FedAvg")
    for row in rows:
        figures, costs = ["-", "-", "-"], row.costs
        if costs is not None and baseline is not None:
            figures[0], figures[2] = f"{_bytes_beside(costs, baseline):.2f}", f"{costs.work:.2f}"
            figures[1] = "-" if costs.time is None else f"{costs.time:.2f}"
        novel = "yes" if FILTERS["--novel"](row) else ""
        cells.append((row.name, row.shared, *figures, ", ".join(row.needs), novel, row.modules))
    table = _table(headings, cells)
    table.box, table.show_edge, table.padding = SIMPLE_HEAD, False, (0, 1, 0, 0)  # 80 columns without cut words
    table.title_justify = "left"
    table.title = (
        "bytes both ways, time and work (training operations) of a round, relative to FedAvg; one width: of the "
        "features, while encoders may differ; novel: clients that never train are served; any module: whether a "
        "LightningModule of yours is trained as it is. pfl methods NAME says more, such as the paper"
    )
    return table


def _bytes_beside(costs: MethodCosts, baseline: MethodCosts) -> float:
    return (costs.down_bytes + costs.up_bytes) / (baseline.down_bytes + baseline.up_bytes)


def method_card(row: MethodRow) -> Table:
    """All that is known of a method."""
    table = Table(title=row.name, show_header=False)
    needs = "; ".join(NEEDS[need] for need in row.needs) or "nothing beyond a training step"
    lines = {"paper": f"{row.paper} {row.year}".strip(), "weights that travel": row.shared, "needs": needs}
    costs, baseline = row.costs, read_costs().get("FedAvg")
    if costs is not None and baseline is not None:
        for_each = f"{_kilobytes(costs.server_bytes_per_client)} a client"
        lines |= {
            "the server sends": f"{', '.join(costs.down) or 'nothing'}: {_kilobytes(costs.down_bytes)}",
            "a client sends": f"{', '.join(costs.up) or 'nothing'}: {_kilobytes(costs.up_bytes)}",
            "a client keeps": _kilobytes(costs.client_bytes),
            "the server keeps": f"{_kilobytes(costs.server_bytes)}, and {for_each}",
            "bytes of a round": f"{_bytes_beside(costs, baseline):.2f} times FedAvg's, both ways",
            "work of a round": f"{costs.work:.2f} times FedAvg's",
            "time of a round": "not measured" if costs.time is None else f"{costs.time:.2f} times FedAvg's",
            "clients' encoders": "may differ" if costs.unequal_encoders else "must be equal",
            "clients that never train": f"{100 * costs.novel_accuracy:.0f} % of ten classes (digits, IID)",
        }
    for name, value in {**lines, "LightningModules": MODULES[row.modules]}.items():
        table.add_row(name, value)
    table.caption = "sizes with FedPAC's CNN (430,760 bytes) and 10 classes"
    return table


def _kilobytes(number: int) -> str:
    return f"{number / 1e3:,.1f} kB"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", show_lines: bool = False) -> Table:
    table = Table(*headings, title=title or None, show_lines=show_lines)
    for column in table.columns:
        column.justify = "right" if column.header in ("features", "parameters") else "left"
    for row in rows:
        table.add_row(*row)
    return table


def print_methods(args: list[str]) -> None:
    """Print what a config can name.

    Raises:
        UsageError: There is no such method or filter.
    """
    parser = WordParser("pfl methods", description="List what a config can name: methods, objectives and encoders.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="methods to describe in full")
    for option, text in HELP.items():
        parser.add_argument(option, help=text, action="store_true")
    asked, rows = vars(parser.parse_intermixed_args(args)), method_rows()
    known, console = {row.name.lower(): row for row in rows}, Console()
    for name in asked["names"]:
        if name.lower() not in known:
            near = did_you_mean(name, [row.name for row in rows])
            raise UsageError(f"there is no method {name}{near} (pfl methods lists those of the package)")
    filters = [fits for option, fits in FILTERS.items() if asked[option[2:].replace("-", "_")]]
    named = [known[name.lower()] for name in asked["names"]]
    fitting = [row for row in named or rows if all(fits(row) for fits in filters)]
    if not fitting:
        return console.print(f"no method fits: {' '.join(args)}")
    for table in map(method_card, fitting) if named else [methods_table(fitting)]:
        console.print(table)
    if not args:
        catalog = read_catalog()
        title = "objectives of PFLSSL and Calibre: --model.method.objective NAME"
        headings = ("objective", "class", "what it does", "source")
        console.print(_table(headings, catalog["objectives"], title, show_lines=True))
        title = "encoders on images of 3 x 32 x 32 (pfl partition --config FILE: those of a run)"
        console.print(_table(("encoder", "class", "features", "parameters"), catalog["encoders"], title))
    return None
