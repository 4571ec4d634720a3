"""Callbacks that look at a fit and change nothing of it."""

from pfl_lightning.callbacks.inspection.accuracy import ClientAccuracy
from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.callbacks.inspection.combination import CombinationWeights
from pfl_lightning.callbacks.inspection.communication import Communication
from pfl_lightning.callbacks.inspection.losses import LossComponents
from pfl_lightning.callbacks.inspection.partition import PartitionPicture

__all__ = [
    "ClientAccuracy",
    "CombinationWeights",
    "Communication",
    "InspectionCallback",
    "LossComponents",
    "PartitionPicture",
]
