"""Inspection callbacks: figures and scalars of a federated run, without any effect on its results."""

from pfl_lightning.callbacks.inspection.attribution import UnitAttribution
from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.callbacks.inspection.combination import CombinationWeights
from pfl_lightning.callbacks.inspection.communication import Communication
from pfl_lightning.callbacks.inspection.features import FeatureEmbedding, RepresentationMeasures
from pfl_lightning.callbacks.inspection.group import Inspection
from pfl_lightning.callbacks.inspection.over_clients import (
    ClientAccuracy,
    ClientMetrics,
    LossComponents,
    PartitionPicture,
)
from pfl_lightning.callbacks.inspection.settings import RunSettings

__all__ = ["ClientAccuracy", "ClientMetrics", "CombinationWeights", "Communication", "FeatureEmbedding"]
__all__ += ["Inspection", "InspectionCallback", "LossComponents", "PartitionPicture", "RepresentationMeasures"]
__all__ += ["RunSettings", "UnitAttribution"]
