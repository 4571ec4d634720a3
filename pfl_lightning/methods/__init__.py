"""The methods: one module each, the client and its server side by side."""

from __future__ import annotations

from pfl_lightning.client import FederatedClient
from pfl_lightning.methods.apfl import APFL
from pfl_lightning.methods.apple import APPLE
from pfl_lightning.methods.calibre import Calibre
from pfl_lightning.methods.cfl import CFL
from pfl_lightning.methods.dcpfl import DCPFL
from pfl_lightning.methods.ditto import Ditto
from pfl_lightning.methods.dualfed import DualFed
from pfl_lightning.methods.fd import FD
from pfl_lightning.methods.fedala import FedALA
from pfl_lightning.methods.fedamp import FedAMP
from pfl_lightning.methods.fedas import FedAS
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedbabu import FedBABU
from pfl_lightning.methods.fedbn import FedBN
from pfl_lightning.methods.fedclassavg import FedClassAvg
from pfl_lightning.methods.fedcm import FedCM
from pfl_lightning.methods.fedcp import FedCP
from pfl_lightning.methods.feddbe import FedDBE
from pfl_lightning.methods.feddyn import FedDyn
from pfl_lightning.methods.fedem import FedEM
from pfl_lightning.methods.fedema import FedEMA
from pfl_lightning.methods.fedetf import FedETF
from pfl_lightning.methods.fedfomo import FedFomo
from pfl_lightning.methods.fedgh import FedGH
from pfl_lightning.methods.fedkd import FedKD
from pfl_lightning.methods.fedlc import FedLC
from pfl_lightning.methods.fedmd import FedMD
from pfl_lightning.methods.fedmtl import FedMTL
from pfl_lightning.methods.fednova import FedNova
from pfl_lightning.methods.fedntd import FedNTD
from pfl_lightning.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from pfl_lightning.methods.fedpac import FedPAC
from pfl_lightning.methods.fedper import FedPer
from pfl_lightning.methods.fedphp import FedPHP
from pfl_lightning.methods.fedproto import FedProto
from pfl_lightning.methods.fedprox import FedProx
from pfl_lightning.methods.fedrep import FedRep
from pfl_lightning.methods.fedrod import FedRoD
from pfl_lightning.methods.fedsa_lora import FedSALoRA
from pfl_lightning.methods.fedtgp import FedTGP
from pfl_lightning.methods.ffa_lora import FFALoRA
from pfl_lightning.methods.fml import FML
from pfl_lightning.methods.gpfl import GPFL
from pfl_lightning.methods.hypcluster import HypCluster
from pfl_lightning.methods.knn_per import KNNPer
from pfl_lightning.methods.ktpfl import KTpFL
from pfl_lightning.methods.lg_fedavg import LGFedAvg
from pfl_lightning.methods.local_only import LocalOnly
from pfl_lightning.methods.moon import MOON
from pfl_lightning.methods.per_fedavg import PerFedAvg
from pfl_lightning.methods.pfedfda import PFedFDA
from pfl_lightning.methods.pfedhn import PFedHN
from pfl_lightning.methods.pfedme import PFedMe
from pfl_lightning.methods.pfedsim import PFedSim
from pfl_lightning.methods.pfl_ssl import PFLSSL
from pfl_lightning.methods.scaffold import SCAFFOLD
from pfl_lightning.methods.spherefed import SphereFed

# Also the order of the methods in tables.
__all__ = [  # noqa: RUF022
    "LocalOnly",
    "FedAvg",
    "FedProx",
    "FedAvgM",
    "FedAdam",
    "FedYogi",
    "FedAdagrad",
    "SCAFFOLD",
    "FedDyn",
    "FedCM",
    "FedNova",
    "FedNTD",
    "FedLC",
    "MOON",
    "FedPer",
    "LGFedAvg",
    "FedRep",
    "FedBN",
    "FedBABU",
    "FedALA",
    "FedDBE",
    "FedAS",
    "Ditto",
    "APFL",
    "FedPHP",
    "PFedSim",
    "PFedMe",
    "PerFedAvg",
    "KNNPer",
    "FedRoD",
    "GPFL",
    "FedCP",
    "HypCluster",
    "CFL",
    "FedEM",
    "FedFomo",
    "FedAMP",
    "FedMTL",
    "APPLE",
    "PFedHN",
    "PFedFDA",
    "SphereFed",
    "FedETF",
    "FedProto",
    "FedTGP",
    "FedGH",
    "FD",
    "FML",
    "FedKD",
    "FedMD",
    "KTpFL",
    "FedClassAvg",
    "FedPAC",
    "DCPFL",
    "DualFed",
    "PFLSSL",
    "FedEMA",
    "Calibre",
]

METHODS: tuple[type[FederatedClient], ...] = tuple(globals()[name] for name in __all__)

ADAPTER_METHODS: tuple[type[FederatedClient], ...] = (FFALoRA, FedSALoRA)
"""Methods for models with low-rank adapters, which other models do not have."""

__all__ += ["ADAPTER_METHODS", "METHODS", "FFALoRA", "FedSALoRA"]
