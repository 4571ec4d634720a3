"""CSV files of plain numbers: a line for each row of the report, and one for each run."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from pfl_lightning.report.output.columns import Column
from pfl_lightning.report.rows import MeasuredRow, ReportSettings
from pfl_lightning.report.significance import PairedTests

__all__ = ["rows_csv", "runs_csv"]


def rows_csv(
    rows: Sequence[MeasuredRow],
    columns: Sequence[Column],
    settings: ReportSettings,
    tests: dict[tuple[str, str], PairedTests],
) -> str:
    """A line for each row, with mean and standard deviation over seeds of each figure in separate columns.

    Args:
        rows: The rows.
        columns: The figures.
        settings: The report's settings.
        tests: Paired tests by setting and label.
    """
    names = [name for c in columns for name in (c.name, f"{c.name}_std_over_seeds")]
    names += [f"{c.name}_seeds" for c in columns if "to_target" in c.name]
    heading = ["setting", "run", "method", "seeds", "planned_seeds", "search_trials"]
    heading += ["rounds", "clients", "score", "model", *names]
    tested = ["reference", "difference", "pairs_of_seeds", "p_seeds", "pairs_of_clients", "p_clients"]
    lines: list[list[Any]] = [[*heading, "published_percent", *tested]]
    for row in rows:
        first = row.runs[0] if row.runs else None
        evaluation = first.evaluation(settings.figure) if first else None
        line: list[Any] = [row.setting, row.label, first.method if first else ""]
        line += [len(row.runs), row.planned, "" if row.trials is None else row.trials]
        line += [first.rounds, first.num_clients] if first else ["", ""]
        line += [evaluation.score, evaluation.model] if evaluation else ["", ""]
        figures = [column.over_seeds(row) for column in columns]
        line += [_number(value) for found in figures for value in (found.mean, found.std)]
        line += [found.count for found, c in zip(figures, columns, strict=True) if "to_target" in c.name]
        line.append("" if row.published is None else row.published)
        test = tests.get((row.setting, row.label))
        line += [""] * len(tested) if test is None else [test.reference, *map(_number, _values(test))]
        lines.append(line)
    return _text(lines)


def _values(test: PairedTests) -> tuple[float, ...]:
    return test.difference, test.seeds, test.p_seeds, test.clients, test.p_clients


def runs_csv(rows: Sequence[MeasuredRow], columns: Sequence[Column]) -> str:
    """A line for each run: its seed, fingerprints and figures.

    Args:
        rows: The rows.
        columns: The figures.
    """
    facts = ["method", "seed", "rounds", "clients", "data", "data_fingerprint", "partition", "partition_fingerprint"]
    lines: list[list[Any]] = [["setting", "run", "folder", *facts, "score", *(column.name for column in columns)]]
    for row in rows:
        for run in row.runs:
            sources = [run.data.name, run.data.fingerprint, run.partition.name, run.partition.fingerprint]
            about = [run.method, run.seed, run.rounds, run.num_clients, *sources, run.test.score]
            figures = [_number(column.figure(run)) for column in columns]
            lines.append([row.setting, row.label, str(run.path), *about, *figures])
    return _text(lines)


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else ""


def _text(lines: list[list[Any]]) -> str:
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue()
