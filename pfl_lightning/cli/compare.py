"""``pfl compare``: tables of finished runs."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pfl_lightning.cli.commands import WordParser, number
from pfl_lightning.errors import ConfigurationError, UsageError
from pfl_lightning.report.formats import fitting_tables
from pfl_lightning.report.grouping import group_runs
from pfl_lightning.report.notes import FAIRNESS
from pfl_lightning.report.rows import ReportSettings, with_figure
from pfl_lightning.report.significance import CAVEAT
from pfl_lightning.report.writing import FORMATS, Report
from pfl_lightning.runs.config import metrics_of
from pfl_lightning.runs.reading import find_runs, read_run
from pfl_lightning.runs.results import CHOICES, FIGURES, FinishedRun

SHORT_CAVEAT = (
    "p values are two-sided, with Holm's correction. Seeds are few and clients of a run share a model: the report and "
    "docs/comparing.md say how far to trust them."
)


def compare(args: Sequence[str]) -> None:
    """``pfl compare RUN...``: print tables of runs; write them with their curves.

    Raises:
        ConfigurationError: A folder has no results.
    """
    options = compare_parser().parse_args(args)
    runs = [run.compared_by(options.figure) for run in _readable_runs(options.runs, options.choice, options.metric)]
    rows = group_runs(runs, options.labels)
    rows = [with_figure(row, options.figure) for row in rows]
    names = list(dict.fromkeys(row.label for row in rows))  # a row may be in several tables
    if options.reference and options.reference not in names:
        raise UsageError(f"--reference {options.reference}: there is no such row; there are {'; '.join(names)}")
    settings = ReportSettings(
        title=options.title,
        choice=options.choice,
        figure=options.figure,
        metric=options.metric,
        target_accuracy=options.target_accuracy,
        reference=options.reference or "",
    )
    report, console = Report(tuple(rows), settings), Console()
    main = [table for tables in report.main_tables() for table in tables]
    for table in [*main, *report.further_tables()]:
        for shown in fitting_tables(table, table.title or settings.title, console):
            console.print(shown)
    for note in report.notes():
        if note != FAIRNESS:  # which files and docs/comparing.md say
            console.print(SHORT_CAVEAT if note == CAVEAT else note, markup=False, highlight=False)
    further = sorted({name for run in runs for name in metrics_of(run.config)})
    if further and options.metric == "accuracy":
        print(f"Compared by accuracy; --metric {further[0]} compares by what was measured beside it")
    forms = list(dict.fromkeys(options.format))
    options.output.mkdir(parents=True, exist_ok=True)
    written = report.write(options.output, {form: f"comparison.{form}" for form in forms})
    print(f"Saved {options.output}/{', '.join(path.name for path in written)}")


def _readable_runs(paths: Sequence[Path], choice: str, metric: str) -> list[FinishedRun]:
    """The runs of some folders; damaged ones that were found beside others are left out with a warning.

    Raises:
        ConfigurationError: The results of a run that was named itself, or of all, cannot be read.
    """
    found = {path: find_runs(path) for path in paths}
    folders = list(dict.fromkeys(folder for runs in found.values() for folder in runs))
    runs: list[FinishedRun] = []
    for folder in folders:
        try:
            runs.append(read_run(folder, choice, metric))
        except ConfigurationError as error:
            if folder in found or (folder == folders[-1] and not runs):
                raise
            warnings.warn(f"left out of the table: {error}", stacklevel=2)
    return runs


def compare_parser() -> argparse.ArgumentParser:
    """The parser of ``pfl compare``."""
    parser = WordParser(
        prog="pfl compare",
        description="Compare finished runs. Runs that differ only in their seeds become one row: mean ± standard "
        "deviation over seeds. Rows are named by what differs between their configs, or as in their study; "
        "runs of different settings, data or partitions, and scores of different kinds, have separate "
        "tables.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run_dir (all its versions), a version_N, or a study")
    add("--labels", nargs="+", metavar="NAME", help="names of the rows, in their order")
    add("--choice", choices=CHOICES, default="last", help="which round's accuracies (default: last)")
    add("--figure", choices=tuple(FIGURES), default="test", help="the accuracy that is compared (default: test)")
    add("--metric", default="accuracy", metavar="NAME", help="metric instead of accuracy, such as f1")
    share = number(float, lambda value: 0 < value <= 1, "above 0 and at most 1 (0.8 is 80 %)")
    add("--target-accuracy", type=share, metavar="A", help="rounds, MB and seconds to this accuracy, such as 0.8")
    add("--reference", metavar="NAME", help="row that the others are tested against (default: the best)")
    add("--title", default="Comparison", help="title of the report")
    add("--output", type=Path, default=Path("comparison"), help="folder of the files (default: comparison)")
    forms = "which of comparison.md, .csv, .tex, .png and .html (default: all)"
    add("--format", nargs="+", choices=FORMATS, default=list(FORMATS), help=forms)
    return parser
