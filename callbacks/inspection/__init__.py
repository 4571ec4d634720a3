"""Callbacks that look at a fit and change nothing of it."""

from pfl_lightning.callbacks.inspection.accuracy import ClientAccuracy
from pfl_lightning.callbacks.inspection.base import InspectionCallback
from pfl_lightning.callbacks.inspection.losses import LossComponents

__all__ = ["ClientAccuracy", "InspectionCallback", "LossComponents"]
