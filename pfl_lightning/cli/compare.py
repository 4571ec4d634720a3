"""Commands for finished runs: ``pfl compare`` and ``pfl tensorboard``."""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from pfl_lightning.cli.comparison import Comparison, compare_runs, find_runs, read_run
from pfl_lightning.errors import ConfigurationError

__all__ = ["compare", "tensorboard"]

CHOICES = ("last", "validation_selected", "best_test")


@dataclass(frozen=True)
class _Column:
    """A figure of a run: its heading, its factor and its digits."""

    attribute: str
    heading: str
    factor: float
    digits: int


COLUMNS = (
    _Column("mean", "mean, %", 100, 2),
    _Column("std", "std over clients, %", 100, 2),
    _Column("worst_decile", "worst decile, %", 100, 2),
    _Column("personalized", "personalized, %", 100, 2),
    _Column("personalized_novel", "novel clients, %", 100, 2),
    _Column("bytes_up", "MB up", 1e-6, 2),
    _Column("bytes_down", "MB down", 1e-6, 2),
    _Column("seconds_per_round", "s a round", 1, 2),
)


def compare(args: Sequence[str]) -> None:
    """``pfl compare RUN...``: print a table of runs; write it as Markdown and CSV, with a picture of the curves.

    Raises:
        ConfigurationError: A folder has no results.
    """
    parser = argparse.ArgumentParser(
        prog="pfl compare",
        description="Compare finished runs. Runs that differ in their seeds only become one row: mean ± "
        "standard deviation over seeds.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run_dir (all its versions) or a version_N")
    parser.add_argument("--labels", nargs="+", help="names of the rows")
    parser.add_argument("--choice", choices=CHOICES, default="last", help="which round's accuracies (default: last)")
    parser.add_argument("--output", type=Path, default=Path("comparison"), help="folder for comparison.md, .csv, .png")
    options = parser.parse_args(args)
    folders = [folder for path in options.runs for folder in find_runs(path)]
    rows = compare_runs([read_run(folder, options.choice) for folder in folders], options.labels)
    columns = [c for c in COLUMNS if any(not math.isnan(row.over_seeds(c.attribute)[0]) for row in rows)]
    console = Console()
    console.print(_rich_table(rows, columns, options.choice, console))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "comparison.md").write_text(_markdown(rows, columns, options.choice))
    _write_csv(options.output / "comparison.csv", rows, columns)
    draw_curves(rows, options.choice).savefig(options.output / "comparison.png", dpi=120)
    print(f"Saved {options.output}/comparison.md, comparison.csv, comparison.png")


def _cells(row: Comparison, columns: Sequence[_Column]) -> list[str]:
    cells = [row.label, str(len(row.runs)), str(row.runs[0].rounds), str(row.runs[0].num_clients)]
    for column in columns:
        middle, spread = (column.factor * value for value in row.over_seeds(column.attribute))
        text = "-" if math.isnan(middle) else f"{middle:,.{column.digits}f}"
        cells.append(text if math.isnan(spread) else f"{text} ± {spread:,.{column.digits}f}")
    return cells


def _headings(columns: Sequence[_Column]) -> list[str]:
    return ["run", "seeds", "rounds", "clients", *(column.heading for column in columns)]


def _caption(choice: str) -> str:
    return f"Test accuracies over clients, {choice.replace('_', ' ')} round; ± is the standard deviation over seeds."


def _rich_table(rows: Sequence[Comparison], columns: Sequence[_Column], choice: str, console: Console) -> Table:
    """A row for each run; a column for each where the terminal is too narrow for that."""
    lines = [_headings(columns), *(_cells(row, columns) for row in rows)]
    table = _table(lines, choice)
    if Measurement.get(console, console.options.update(max_width=10_000), table).maximum <= console.width:
        return table
    return _table([list(line) for line in zip(*lines, strict=True)], choice)


def _table(lines: Sequence[Sequence[str]], choice: str) -> Table:
    table = Table(title=_caption(choice))
    for index, heading in enumerate(lines[0]):
        table.add_column(heading, justify="right" if index else "left", overflow="fold")
    for line in lines[1:]:
        table.add_row(*line)
    return table


def _markdown(rows: Sequence[Comparison], columns: Sequence[_Column], choice: str) -> str:
    headings = _headings(columns)
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(row, columns)) + " |" for row in rows]
    return "\n".join([_caption(choice), "", *lines, ""])


def _write_csv(path: Path, rows: Sequence[Comparison], columns: Sequence[_Column]) -> None:
    """Plain numbers, with the mean and the standard deviation over seeds of each figure in separate columns."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        spreads = [name for column in columns for name in (column.attribute, f"{column.attribute}_std_over_seeds")]
        writer.writerow(["run", "method", "seeds", "rounds", "clients", *spreads])
        for row in rows:
            first = row.runs[0]
            figures = [value for column in columns for value in row.over_seeds(column.attribute)]
            cells = ["" if math.isnan(value) else value for value in figures]
            writer.writerow([row.label, first.method, len(row.runs), first.rounds, first.num_clients, *cells])


def draw_curves(rows: Sequence[Comparison], choice: str) -> Figure:
    """Learning curves, with a band of one standard deviation over seeds, and the clients' accuracies."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    curves, clients = figure.subplots(1, 2, width_ratios=[3, 2])
    for row in rows:
        curve = row.curve()
        rounds = [round for round, _, _ in curve]
        means = [100 * mean for _, mean, _ in curve]
        (line,) = curves.plot(rounds, means, label=row.label)
        if len(row.runs) > 1:
            low, high = ([100 * (mean + sign * std) for _, mean, std in curve] for sign in (-1, 1))
            curves.fill_between(rounds, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    curves.set(xlabel="round", ylabel="test accuracy, mean over clients, %")
    curves.legend(loc="lower right")
    curves.grid(alpha=0.3)
    accuracies = [[100 * value for run in row.runs for value in run.clients] for row in rows]
    clients.boxplot(accuracies, tick_labels=[row.label for row in rows], whis=(0, 100))
    clients.set(ylabel=f"test accuracy of a client, {choice.replace('_', ' ')} round, %")
    clients.grid(alpha=0.3, axis="y")
    clients.tick_params(axis="x", rotation=20)
    return figure


def tensorboard_arguments(args: Sequence[str]) -> list[str]:
    """The arguments of TensorBoard for the runs of ``pfl tensorboard RUN... [options of TensorBoard]``.

    Raises:
        ConfigurationError: No run is given, or a folder has no event files.
    """
    split = next((index for index, word in enumerate(args) if word.startswith("-")), len(args))
    paths, options = [Path(word) for word in args[:split]], list(args[split:])
    if not paths:
        raise ConfigurationError("give the folder of a run: pfl tensorboard runs/fedpac_digits [--port 6007 ...]")
    for path in paths:
        if next(path.rglob("events.out.tfevents.*"), None) is None:
            there = "there is no such folder" if not path.is_dir() else "the run had another logger, or none"
            raise ConfigurationError(f"no TensorBoard event files in {path}: {there}")
    if len(paths) == 1:
        return ["--logdir", str(paths[0].resolve()), *options]
    for path in paths:
        if any(sign in str(path) for sign in ",:"):
            raise ConfigurationError(f"TensorBoard cannot show {path} next to others: its name has ',' or ':'")
    return ["--logdir_spec", ",".join(f"{path.as_posix().strip('/')}:{path.resolve()}" for path in paths), *options]


def tensorboard(args: Sequence[str]) -> None:
    """``pfl tensorboard RUN...``: start TensorBoard on the folders of runs, until Ctrl-C."""
    if not args or args[0] in ("-h", "--help"):
        print(
            "usage: pfl tensorboard RUN [RUN ...] [options of tensorboard, such as --port 6007]\n\n"
            "RUN is a run_dir (all its versions) or a version_N."
        )
        return
    arguments = tensorboard_arguments(args)
    from tensorboard import default
    from tensorboard.program import TensorBoard

    program = TensorBoard(default.get_plugins())
    program.configure(["tensorboard", *arguments])
    program.main()
