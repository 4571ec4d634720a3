"""Callbacks for the Trainer of a federation: the training loop, results, tables, stragglers and inspection."""

from pfl_lightning.callbacks import inspection
from pfl_lightning.callbacks.inspection import *  # noqa: F403
from pfl_lightning.callbacks.loop import FederatedLoop
from pfl_lightning.callbacks.progress import RoundProgress
from pfl_lightning.callbacks.results import ResultsWriter
from pfl_lightning.callbacks.stragglers import Stragglers
from pfl_lightning.callbacks.tables import ArchitectureTable, architecture_table, results_table
from pfl_lightning.devices import Devices
from pfl_lightning.federation.loop import RoundLoop
from pfl_lightning.round import Traffic

__all__ = ["ArchitectureTable", "Devices", "FederatedLoop", "ResultsWriter", "RoundLoop", "RoundProgress", "Stragglers"]
__all__ += ["Traffic", "architecture_table", "results_table", *inspection.__all__]
