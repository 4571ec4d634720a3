"""Callbacks for the Trainer of a federation: loop, results, tables, inspection, clients that are late or that lie."""

from pfl_lightning.callbacks import inspection
from pfl_lightning.callbacks.attacks import Attack
from pfl_lightning.callbacks.inspection import *  # noqa: F403
from pfl_lightning.callbacks.loop import FederatedLoop
from pfl_lightning.callbacks.progress import RoundProgress
from pfl_lightning.callbacks.results import ResultsWriter
from pfl_lightning.callbacks.stragglers import Stragglers
from pfl_lightning.callbacks.tables import ArchitectureTable, architecture_table, results_table
from pfl_lightning.devices import Devices
from pfl_lightning.federation.loop import RoundLoop
from pfl_lightning.round import Traffic

__all__ = ["ArchitectureTable", "Attack", "Devices", "FederatedLoop", "ResultsWriter", "RoundLoop", "RoundProgress"]
__all__ += ["Stragglers", "Traffic", "architecture_table", "results_table", *inspection.__all__]
