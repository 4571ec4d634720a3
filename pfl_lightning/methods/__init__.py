"""The methods: one module each, the client and its server side by side."""

from __future__ import annotations

from pfl_lightning.client import FederatedClient
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedbabu import FedBABU
from pfl_lightning.methods.fedpac import FedPAC
from pfl_lightning.methods.fedper import FedPer
from pfl_lightning.methods.fedprox import FedProx
from pfl_lightning.methods.fedrep import FedRep
from pfl_lightning.methods.lg_fedavg import LGFedAvg
from pfl_lightning.methods.local_only import LocalOnly

METHODS: tuple[type[FederatedClient], ...] = (LocalOnly, FedAvg, FedProx, FedPer, LGFedAvg, FedRep, FedBABU, FedPAC)

__all__ = ["METHODS", "FedAvg", "FedBABU", "FedPAC", "FedPer", "FedProx", "FedRep", "LGFedAvg", "LocalOnly"]
