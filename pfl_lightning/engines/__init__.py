"""How a local fit runs: the engines that train clients."""

from pfl_lightning.engines.base import LocalFit
from pfl_lightning.engines.ray.engine import RayFit
from pfl_lightning.engines.sequential import FabricFit
from pfl_lightning.engines.tasks import EvaluationResult, EvaluationTask, FitEnvironment, FitResult, FitTask
from pfl_lightning.engines.trainer import TrainerFit
from pfl_lightning.engines.vectorized.engine import VectorizedFit

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
