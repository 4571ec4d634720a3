"""Studies: a file that names methods, settings and seeds, whose runs make one table.

=======================================  ==========================================================================
``command``, ``arguments``               ``pfl study`` and ``pfl reproduce``; what their command lines say
``definition``                           study files, and the runs that they consist of, each with its config
``agenda``, ``conduct``                  what one command has to do with a study; the steps in which it does so
``check``                                configs are checked before anything is run
``runner``, ``shared_training``          starts runs, several at once; runs that train alike train once
``callbacks``, ``display``               a run says how far it is; what is shown of all of them, and the time left
``run_state``, ``changed``               how far a run is by its folder; what was made with other options
``searches``, ``tuner``, ``trials``      rows whose options are searched; the search with optuna; its trials
``tables``                               the tables of what is done
=======================================  ==========================================================================
"""

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
