"""Reports of finished runs: tables, significance, rankings and curves, as Markdown, CSV, LaTeX, PNG and HTML.

=======================================  ==========================================================================
``rows``, ``grouping``, ``labels``       runs of one method and setting; which runs belong together; their names
``statistics``                           figures over seeds, rounds and bytes to a target accuracy
``significance``, ``ranking``            paired tests; ranking of methods over settings
``output``                               tables, curves and the page, as files and on a terminal
=======================================  ==========================================================================
"""

from pfl_lightning.report.output.writing import live_table, write_report
from pfl_lightning.report.rows import ReportSettings, Row
from pfl_lightning.runs.reading import find_runs, read_run
from pfl_lightning.runs.results import Evaluation, FinishedRun, HistoryEntry, Source

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
