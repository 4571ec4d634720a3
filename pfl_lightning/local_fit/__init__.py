"""How a local fit runs: the engines that train clients."""

from pfl_lightning.local_fit.base import LocalFit
from pfl_lightning.local_fit.fabric import FabricFit
from pfl_lightning.local_fit.ray_fit import RayFit
from pfl_lightning.local_fit.tasks import EvaluationResult, EvaluationTask, FitEnvironment, FitResult, FitTask
from pfl_lightning.local_fit.trainer import TrainerFit
from pfl_lightning.local_fit.vectorized import VectorizedFit

__all__ = [
    "EvaluationResult",
    "EvaluationTask",
    "FabricFit",
    "FitEnvironment",
    "FitResult",
    "FitTask",
    "LocalFit",
    "RayFit",
    "TrainerFit",
    "VectorizedFit",
]
