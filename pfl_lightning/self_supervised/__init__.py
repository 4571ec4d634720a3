"""Self-supervised objectives: losses of two views of a batch, without labels.

====================================================================  =============================================
``objective``                                                         ``Objective``, the base of all objectives
``simclr``, ``byol``, ``simsiam``, ``mocov2``, ``swav``, ``smog``     one objective each
``target``                                                            networks that follow by a moving average
``registry``                                                          objectives by name: ``make_objective``
====================================================================  =============================================

Heads, losses and memory banks are lightly's (``pip install "pfl-lightning[ssl]"``), imported when an objective is made.
"""

from pfl_lightning.self_supervised.byol import BYOL
from pfl_lightning.self_supervised.mocov2 import MoCoV2
from pfl_lightning.self_supervised.objective import Objective, ObjectiveOutput
from pfl_lightning.self_supervised.registry import OBJECTIVES, ObjectiveFactory, make_objective
from pfl_lightning.self_supervised.simclr import SimCLR
from pfl_lightning.self_supervised.simsiam import SimSiam
from pfl_lightning.self_supervised.smog import SMoG
from pfl_lightning.self_supervised.swav import SwAV
from pfl_lightning.self_supervised.target import TargetNetwork

__all__ = [
    "BYOL",
    "OBJECTIVES",
    "MoCoV2",
    "Objective",
    "ObjectiveFactory",
    "ObjectiveOutput",
    "SMoG",
    "SimCLR",
    "SimSiam",
    "SwAV",
    "TargetNetwork",
    "make_objective",
]
