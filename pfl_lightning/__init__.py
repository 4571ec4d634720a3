"""Personalized federated learning on PyTorch Lightning."""

from pfl_lightning.client import Citation, FederatedClient, FitContext, Phase
from pfl_lightning.drop_in.federate import federate
from pfl_lightning.engines import FabricFit, LocalFit, RayFit, TrainerFit, VectorizedFit
from pfl_lightning.federation import Federation
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.server import Aggregator, AveragingAggregator, Mixture
from pfl_lightning.state.export import export_clients

__version__ = "0.1.0"

__all__ = [
    "Aggregator",
    "AveragingAggregator",
    "Broadcast",
    "Citation",
    "ClientUpdate",
    "FabricFit",
    "FederatedClient",
    "Federation",
    "FitContext",
    "LocalFit",
    "Mixture",
    "Phase",
    "RayFit",
    "TrainerFit",
    "VectorizedFit",
    "export_clients",
    "federate",
]
