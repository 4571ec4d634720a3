"""Engines: where and how the local fits of clients run."""

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
