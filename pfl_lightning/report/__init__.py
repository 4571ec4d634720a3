"""Reports of finished runs: tables, significance, rankings and curves, as Markdown, CSV, LaTeX, PNG and HTML.

=======================================  ==========================================================================
``rows``                                 runs of one method and setting; figures over seeds, rounds and bytes
``grouping``                             which runs belong together, and what their rows are called
``significance``                         paired tests, and the ranking of methods over settings
``tables``, ``notes``, ``curves``        tables as texts, and their columns; the sentences below them; pictures
``formats``, ``page``                    Markdown, LaTeX, CSV and the terminal; the HTML page
``writing``                              all of it as files, and the table on a terminal
=======================================  ==========================================================================
"""

from pfl_lightning.report.rows import ReportSettings, Row
from pfl_lightning.report.writing import live_table, write_report
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
