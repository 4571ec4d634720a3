"""Callbacks for the Trainer of a federation: the training loop, results, tables and inspection."""

from pfl_lightning.callbacks import inspection
from pfl_lightning.callbacks.inspection import *  # noqa: F403
from pfl_lightning.callbacks.loop import FederatedLoop
from pfl_lightning.callbacks.progress import RoundProgress
from pfl_lightning.callbacks.results import ResultsWriter
from pfl_lightning.callbacks.tables import ArchitectureTable, architecture_table, results_table
from pfl_lightning.federation.loop import RoundLoop
from pfl_lightning.round import Traffic

__all__ = ["ArchitectureTable", "FederatedLoop", "ResultsWriter", "RoundLoop", "RoundProgress", "Traffic"]
__all__ += ["architecture_table", "results_table", *inspection.__all__]
