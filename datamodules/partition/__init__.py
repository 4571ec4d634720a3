"""Partition rules, which assign the samples of a data set to clients, and files and figures of partitions.

Every rule is a :class:`Partitioner` with ``partition(labels) -> list of index arrays``, a pure function of (labels,
arguments, seed).
"""

from pfl_lightning.datamodules.clients.views import ClientView
from pfl_lightning.datamodules.counting import class_counts
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError
from pfl_lightning.datamodules.partition.dirichlet import DirichletOverClasses, DirichletOverClients
from pfl_lightning.datamodules.partition.domains import Domains
from pfl_lightning.datamodules.partition.file import FromFile, save_partition
from pfl_lightning.datamodules.partition.rules import IID, ClassesPerClient, DominantClasses, dominant_groups
from pfl_lightning.datamodules.partition.transform import ConceptShift, FeatureShift, PartitionTransform, Quantity

__all__ = [
    "IID",
    "ClassesPerClient",
    "ClientView",
    "ConceptShift",
    "DirichletOverClasses",
    "DirichletOverClients",
    "Domains",
    "DominantClasses",
    "FeatureShift",
    "FromFile",
    "PartitionError",
    "PartitionTransform",
    "Partitioner",
    "Quantity",
    "class_counts",
    "dominant_groups",
    "save_partition",
]
