"""Reports of finished runs: tables, significance, rankings and curves, as Markdown, CSV, LaTeX, PNG and HTML.

=======================================  ==========================================================================
From folders to rows
``reading``, ``run``, ``options``        a run's folder, what it says, and the options of its config
``study_folder``                         what a study calls a run
``rows``, ``grouping``                   runs of one method and setting; which runs belong together, and their names
What is computed
``statistics``                           figures over seeds, rounds and bytes to a target accuracy
``significance``, ``ranking``            paired tests; ranking of methods over settings
What is written
``tables``, ``columns``, ``notes``       tables as texts, their columns, and the sentences below them
``curves``                               learning curves and the clients' accuracies
``formats``, ``csv_files``, ``page``     Markdown, LaTeX, HTML, terminal; CSV; the HTML page
``writing``                              all of it as files, and the table on a terminal
=======================================  ==========================================================================
"""

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
