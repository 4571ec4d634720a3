"""Personalized federated learning on PyTorch Lightning."""

from pfl_lightning.client import Citation, FederatedClient, FitContext, Phase
from pfl_lightning.drop_in.federate import federate
from pfl_lightning.engines import Engine, RayEngine, SequentialEngine, TrainerEngine, VectorizedEngine
from pfl_lightning.federation import Federation
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.server import AggregationWeights, Aggregator, AveragingAggregator
from pfl_lightning.state.export import export_clients

__version__ = "0.1.0"

__all__ = [
    "AggregationWeights",
    "Aggregator",
    "AveragingAggregator",
    "Broadcast",
    "Citation",
    "ClientUpdate",
    "Engine",
    "FederatedClient",
    "Federation",
    "FitContext",
    "Phase",
    "RayEngine",
    "SequentialEngine",
    "TrainerEngine",
    "VectorizedEngine",
    "export_clients",
    "federate",
]
