"""Personalized federated learning on PyTorch Lightning."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from pfl_lightning.callbacks.loop import FederatedLoop
from pfl_lightning.callbacks.results import ResultsWriter
from pfl_lightning.client import Citation, FederatedClient, FitContext, Phase
from pfl_lightning.drop_in.adapters import export_adapters
from pfl_lightning.drop_in.federate import federate
from pfl_lightning.engines import Engine, ProcessEngine, RayEngine, SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.federation import Federation
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.server import AggregationWeights, Aggregator, AveragingAggregator
from pfl_lightning.state.export import export_clients

if TYPE_CHECKING:  # imported by __getattr__ when they are asked for
    from pfl_lightning import callbacks as callbacks
    from pfl_lightning import datamodules as datamodules
    from pfl_lightning import encoders as encoders
    from pfl_lightning import functional as functional
    from pfl_lightning import methods as methods
    from pfl_lightning import self_supervised as self_supervised

__version__ = "0.2.0"

__all__ = [
    "AggregationWeights",
    "Aggregator",
    "AveragingAggregator",
    "Broadcast",
    "Citation",
    "ClientUpdate",
    "Engine",
    "FederatedClient",
    "FederatedLoop",
    "Federation",
    "FitContext",
    "Phase",
    "ProcessEngine",
    "RayEngine",
    "ResultsWriter",
    "SequentialEngine",
    "TrainerEngine",
    "VectorizedEngine",
    "export_adapters",
    "export_clients",
    "federate",
]

_LAZY = frozenset({"callbacks", "datamodules", "encoders", "functional", "methods", "self_supervised"})


def __getattr__(name: str) -> ModuleType:
    """Import a subpackage when it is first used as an attribute (PEP 562)."""
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
