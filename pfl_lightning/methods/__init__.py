"""The methods: one module each, the client and its server side by side."""

from __future__ import annotations

from pfl_lightning.client import FederatedClient
from pfl_lightning.methods.apfl import APFL as APFL
from pfl_lightning.methods.calibre import Calibre as Calibre
from pfl_lightning.methods.dcpfl import DCPFL as DCPFL
from pfl_lightning.methods.ditto import Ditto as Ditto
from pfl_lightning.methods.dualfed import DualFed as DualFed
from pfl_lightning.methods.fd import FD as FD
from pfl_lightning.methods.fedala import FedALA as FedALA
from pfl_lightning.methods.fedamp import FedAMP as FedAMP
from pfl_lightning.methods.fedas import FedAS as FedAS
from pfl_lightning.methods.fedavg import FedAvg as FedAvg
from pfl_lightning.methods.fedbabu import FedBABU as FedBABU
from pfl_lightning.methods.fedbn import FedBN as FedBN
from pfl_lightning.methods.fedclassavg import FedClassAvg as FedClassAvg
from pfl_lightning.methods.feddbe import FedDBE as FedDBE
from pfl_lightning.methods.fedem import FedEM as FedEM
from pfl_lightning.methods.fedema import FedEMA as FedEMA
from pfl_lightning.methods.fedetf import FedETF as FedETF
from pfl_lightning.methods.fedfomo import FedFomo as FedFomo
from pfl_lightning.methods.fedgh import FedGH as FedGH
from pfl_lightning.methods.fedkd import FedKD as FedKD
from pfl_lightning.methods.fedmd import FedMD as FedMD
from pfl_lightning.methods.fedpac import FedPAC as FedPAC
from pfl_lightning.methods.fedper import FedPer as FedPer
from pfl_lightning.methods.fedproto import FedProto as FedProto
from pfl_lightning.methods.fedprox import FedProx as FedProx
from pfl_lightning.methods.fedrep import FedRep as FedRep
from pfl_lightning.methods.fedrod import FedRoD as FedRoD
from pfl_lightning.methods.fedsa_lora import FedSALoRA as FedSALoRA
from pfl_lightning.methods.fedtgp import FedTGP as FedTGP
from pfl_lightning.methods.ffa_lora import FFALoRA as FFALoRA
from pfl_lightning.methods.fml import FML as FML
from pfl_lightning.methods.gpfl import GPFL as GPFL
from pfl_lightning.methods.hypcluster import HypCluster as HypCluster
from pfl_lightning.methods.knn_per import KNNPer as KNNPer
from pfl_lightning.methods.ktpfl import KTpFL as KTpFL
from pfl_lightning.methods.lg_fedavg import LGFedAvg as LGFedAvg
from pfl_lightning.methods.local_only import LocalOnly as LocalOnly
from pfl_lightning.methods.moon import MOON as MOON
from pfl_lightning.methods.per_fedavg import PerFedAvg as PerFedAvg
from pfl_lightning.methods.pfedfda import PFedFDA as PFedFDA
from pfl_lightning.methods.pfedhn import PFedHN as PFedHN
from pfl_lightning.methods.pfedme import PFedMe as PFedMe
from pfl_lightning.methods.pfl_ssl import PFLSSL as PFLSSL
from pfl_lightning.methods.scaffold import SCAFFOLD as SCAFFOLD
from pfl_lightning.methods.spherefed import SphereFed as SphereFed

METHODS: tuple[type[FederatedClient], ...] = (
    LocalOnly,
    FedAvg,
    FedProx,
    SCAFFOLD,
    MOON,
    FedPer,
    LGFedAvg,
    FedRep,
    FedBN,
    FedBABU,
    FedALA,
    FedDBE,
    FedAS,
    Ditto,
    APFL,
    PFedMe,
    PerFedAvg,
    KNNPer,
    FedRoD,
    GPFL,
    HypCluster,
    FedEM,
    FedFomo,
    FedAMP,
    PFedHN,
    PFedFDA,
    SphereFed,
    FedETF,
    FedProto,
    FedTGP,
    FedGH,
    FD,
    FML,
    FedKD,
    FedMD,
    KTpFL,
    FedClassAvg,
    FedPAC,
    DCPFL,
    DualFed,
    PFLSSL,
    FedEMA,
    Calibre,
)

ADAPTER_METHODS: tuple[type[FederatedClient], ...] = (FFALoRA, FedSALoRA)
"""Methods for models with low-rank adapters, which other models do not have."""

__all__ = ["ADAPTER_METHODS", "METHODS", *(method.__name__ for method in (*METHODS, *ADAPTER_METHODS))]
