"""Reports of finished runs: tables, significance, rankings and curves, as Markdown, CSV, LaTeX, PNG and HTML."""

from pfl_lightning.report.reading import find_runs, read_run
from pfl_lightning.report.rows import ReportSettings, Row
from pfl_lightning.report.run import Evaluation, FinishedRun, HistoryEntry, Source
from pfl_lightning.report.writing import live_table, write_report

__all__ = [
    "Evaluation",
    "FinishedRun",
    "HistoryEntry",
    "ReportSettings",
    "Row",
    "Source",
    "find_runs",
    "live_table",
    "read_run",
    "write_report",
]
