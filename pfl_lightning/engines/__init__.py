"""Engines: where and how the local fits of clients run.

=======================================  ==========================================================================
``base``, ``lifecycle``                  what all engines do; the steps of a local fit
``sequential``, ``trainer``              a loop of PyTorch; an inner Trainer
``vectorized``, ``workers``              clients that train at once; worker processes, of this machine or of Ray
``schedules``                            learning-rate schedules of built-in methods over rounds, and steps counted
``isolation_check``                      whether a fit starts from its own client's state
``advice``, ``threads``                  errors with a remedy; how many threads pay
=======================================  ==========================================================================
"""

from pfl_lightning.engines.base import Engine
from pfl_lightning.engines.sequential import SequentialEngine
from pfl_lightning.engines.trainer import TrainerEngine
from pfl_lightning.engines.vectorized.engine import VectorizedEngine
from pfl_lightning.engines.workers.processes import ProcessEngine
from pfl_lightning.engines.workers.ray import RayEngine
from pfl_lightning.fit.tasks import EvaluationResult, EvaluationTask, FitEnvironment, FitResult, FitTask

__all__ = [
    "Engine",
    "EvaluationResult",
    "EvaluationTask",
    "FitEnvironment",
    "FitResult",
    "FitTask",
    "ProcessEngine",
    "RayEngine",
    "SequentialEngine",
    "TrainerEngine",
    "VectorizedEngine",
]
