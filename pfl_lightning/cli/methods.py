"""``pfl methods``: what a config can name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from pfl_lightning.cli.options.catalog import Catalog, MethodCosts, Need, read_catalog, read_costs, variant_of
from pfl_lightning.cli.options.names import nearest_flag
from pfl_lightning.errors import UsageError
from pfl_lightning.names import nearest

__all__ = [
    "MethodRow",
    "encoders_table",
    "method_card",
    "method_rows",
    "methods_table",
    "objectives_table",
    "print_methods",
]

USAGE = """usage: pfl methods                  the methods, the self-supervised objectives and the encoders
       pfl methods FILTER...        the methods that fit: --heterogeneous (clients' encoders may differ),
                                    --novel (clients that never trained are served, too),
                                    --public (clients learn from public samples),
                                    --any-module (any LightningModule), --classifiers (those that classify, too)
       pfl methods NAME...          all that is known of some methods
       pfl methods --config FILE    the architectures of a run, and how many clients have each"""

MODULES = {
    "yes": "any",
    "classifiers": "any that classifies",
    "adapters": "those with low-rank adapters",
    "": "the package's own",
}
"""What the last column means."""

NEEDS = {
    Need.FEATURES: "features in front of a head",
    Need.ADAPTERS: "low-rank adapters in the model",
    Need.PUBLIC: "public samples (the data module's public=...)",
    Need.VALIDATION: "a validation part of every client (validation_share)",
    Need.ENCODERS: "equal encoders",
    Need.WIDTH: "features of one width",
    Need.PARTNER: "a second network like the own or, where encoders differ, its partner=, which is the same for all",
}
"""What the column of needs means."""

BETTER_THAN_CHANCE = 0.3
"""Accuracy, of ten classes, from which clients that never trained count as served."""

FILTERS: dict[str, Callable[[MethodRow], bool]] = {
    "--heterogeneous": lambda row: row.costs is not None and row.costs.unequal_encoders,
    "--novel": lambda row: row.costs is not None and row.costs.novel_accuracy >= BETTER_THAN_CHANCE,
    "--public": lambda row: Need.PUBLIC in row.needs,
    "--any-module": lambda row: row.modules == "yes",
    "--classifiers": lambda row: row.modules in ("yes", "classifiers"),
}


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
    needs: tuple[Need, ...]
    costs: MethodCosts | None


def method_rows(catalog: Catalog) -> list[MethodRow]:
    """The methods of the catalog with what was measured of them."""
    costs = read_costs()
    return [
        MethodRow(name, year, paper, shared, modules, _needs(needs, costs.get(name)), costs.get(name))
        for name, year, paper, shared, modules, needs in catalog.methods
    ]


def _needs(declared: str, costs: MethodCosts | None) -> tuple[Need, ...]:
    """What the class says and, where it was measured, whether encoders must be equal."""
    needs = [Need(word) for word in declared.split(", ") if word]
    return (*needs, *([Need.ENCODERS] if costs is not None and not costs.unequal_encoders else []))


def methods_table(rows: Sequence[MethodRow]) -> Table:
    """What travels, what stays, whom a method can serve, and what it costs beside FedAvg."""
    headings = ("method", "weights that travel", "bytes", "time", "work", "needs", "novel", "any module")
    baseline = read_costs().get("FedAvg")
    table = _table(headings, [_cells(row, baseline) for row in rows])
    table.caption = (
        "bytes both ways, time and work (operations of training) of a round over FedAvg's; one width: of the features, "
        "while encoders may differ; novel: clients that never train are served. pfl methods NAME says more, the paper "
        "and what clients and server keep included"
    )
    return table


def _cells(row: MethodRow, baseline: MethodCosts | None) -> tuple[str, ...]:
    costs, needs = row.costs, ", ".join(row.needs)
    if costs is None or baseline is None:
        return (row.name, row.shared, "-", "-", "-", needs, "-", row.modules)
    both = _bytes_beside(costs, baseline)
    time = "-" if costs.time is None else f"{costs.time:.2f}"
    novel = "yes" if FILTERS["--novel"](row) else ""
    return (row.name, row.shared, f"{both:.2f}", time, f"{costs.work:.2f}", needs, novel, row.modules)


def _bytes_beside(costs: MethodCosts, baseline: MethodCosts) -> float:
    return (costs.down_bytes + costs.up_bytes) / (baseline.down_bytes + baseline.up_bytes)


def method_card(row: MethodRow) -> Table:
    """All that is known of a method."""
    table = Table(title=row.name, show_header=False)
    needs = "; ".join(NEEDS[need] for need in row.needs) or "nothing beyond a training step"
    lines = {"paper": f"{row.paper} {row.year}".strip(), "weights that travel": row.shared, "needs": needs}
    costs, baseline = row.costs, read_costs().get("FedAvg")
    if costs is not None and baseline is not None:
        server = f"{costs.server_bytes / 1e3:,.1f} kB, and {costs.server_bytes_per_client / 1e3:,.1f} kB a client"
        time = "not measured" if costs.time is None else f"{costs.time:.2f} times FedAvg's"
        if costs.overhead is not None and costs.overhead_long is not None:
            time += f"; {costs.overhead:.2f} times a plain loop of as many operations, "
            time += f"{costs.overhead_long:.2f} with more steps"
        lines |= {
            "the server sends": _sent(costs.down, costs.down_bytes),
            "a client sends": _sent(costs.up, costs.up_bytes),
            "a client keeps": f"{costs.client_bytes / 1e3:,.1f} kB",
            "the server keeps": server,
            "bytes of a round": f"{_bytes_beside(costs, baseline):.2f} times FedAvg's, both ways",
            "work of a round": f"{costs.work:.2f} times FedAvg's",
            "time of a round": time,
            "clients' encoders": "may differ" if costs.unequal_encoders else "must be equal",
            "clients that never train": f"{100 * costs.novel_accuracy:.0f} % of ten classes (digits, IID)",
        }
    lines["LightningModules"] = MODULES[row.modules]
    for name, value in lines.items():
        table.add_row(name, value)
    table.caption = "sizes with FedPAC's CNN (430,760 bytes) and 10 classes"
    return table


def _sent(parts: Sequence[str], number: int) -> str:
    return f"{', '.join(parts)}: {number / 1e3:,.1f} kB" if number else "nothing"


def objectives_table(catalog: Catalog) -> Table:
    """The self-supervised objectives."""
    title = "objectives of PFLSSL and Calibre: --model.method.objective NAME"
    return _table(("objective", "class", "what it does", "source"), catalog.objectives, title, show_lines=True)


def encoders_table(catalog: Catalog) -> Table:
    """The registered encoders on small images."""
    title = "encoders on images of 3 x 32 x 32 (pfl methods --config FILE: those of a run)"
    return _table(("encoder", "class", "features", "parameters"), catalog.encoders, title)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", show_lines: bool = False) -> Table:
    table = Table(title=title or None, show_lines=show_lines)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in ("features", "parameters") else "left")
    for row in rows:
        table.add_row(*row)
    return table


def print_methods(args: list[str]) -> None:
    """Print what a config can name; with a config, the architectures of its federation."""
    if {"-h", "--help"} & set(args):
        return print(USAGE)
    console = Console()
    if args and not any(word == "--config" or word.startswith("--config=") for word in args):
        return _chosen(args, console)
    if args:
        from pfl_lightning.callbacks import architecture_table
        from pfl_lightning.cli.federated_cli import FederatedCLI

        cli = FederatedCLI(args=args, run=False)
        cli.datamodule.prepare_data()
        cli.datamodule.setup("fit")
        rows, number = cli.model.describe(cli.datamodule), cli.datamodule.num_clients
        return console.print(architecture_table(rows, f"{number} clients"))
    catalog = read_catalog()
    rows = method_rows(catalog)
    console.print(methods_table(rows))
    for table in (objectives_table, encoders_table):
        console.print(table(catalog))
    return None


def _hint(word: str, catalog: Catalog) -> str:
    """What was probably meant by a word that is neither a method nor a filter."""
    if word.startswith("-"):
        near = nearest_flag(word, [*FILTERS, "--config"])
        return f"did you mean {near}?" if near else "pfl methods --help lists the filters"
    methods, objectives = [row[0] for row in catalog.methods], [row[0] for row in catalog.objectives]
    if variant := variant_of(word, methods, objectives):
        return f"it is {variant}: pfl methods {variant.split()[0]}"
    if word in (row[0] for row in catalog.encoders):
        return f"it is an encoder: --model.encoder {word}"
    near = nearest(word, methods)
    return f"did you mean {near}?" if near else "pfl methods lists all"


def _chosen(args: Sequence[str], console: Console) -> None:
    """Print the methods that were named, or those that fit the filters."""
    catalog = read_catalog()
    rows = method_rows(catalog)
    names = {row.name.lower(): row for row in rows}
    for word in args:
        if word not in FILTERS and word.lower() not in names:
            raise UsageError(f"pfl methods: there is no method {word}; {_hint(word, catalog)}")
    filters = [FILTERS[word] for word in args if word in FILTERS]
    named = [names[word.lower()] for word in args if word not in FILTERS]
    fitting = [row for row in named or rows if all(fits(row) for fits in filters)]
    if not fitting:
        return console.print(f"no method fits: {' '.join(args)}")
    for card in [method_card(row) for row in fitting] if named else [methods_table(fitting)]:
        console.print(card)
    return None
