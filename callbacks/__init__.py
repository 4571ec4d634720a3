"""Callbacks for the outer Trainer of a federation."""

from pfl_lightning.callbacks.architectures import ArchitectureTable, architecture_table
from pfl_lightning.callbacks.inspection import ClientAccuracy, InspectionCallback, LossComponents
from pfl_lightning.callbacks.loop import FederatedLoop
from pfl_lightning.callbacks.results import ResultsWriter
from pfl_lightning.callbacks.traffic import Traffic

__all__ = [
    "ArchitectureTable",
    "ClientAccuracy",
    "FederatedLoop",
    "InspectionCallback",
    "LossComponents",
    "ResultsWriter",
    "Traffic",
    "architecture_table",
]
