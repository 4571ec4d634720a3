"""Studies: a file that names methods, settings and seeds, whose runs make one table."""

from pfl_lightning.study.definition.options import merge, with_option
from pfl_lightning.study.definition.plan import Cell, Run, plan_cells, plan_runs
from pfl_lightning.study.definition.reader import read_study
from pfl_lightning.study.definition.study import Dimension, Published, Search, Study
from pfl_lightning.study.trials import run_trial

__all__ = [
    "Cell",
    "Dimension",
    "Published",
    "Run",
    "Search",
    "Study",
    "merge",
    "plan_cells",
    "plan_runs",
    "read_study",
    "run_trial",
    "with_option",
]
