"""Data of a federation: partition rules, client views and data sets.

A :class:`FederatedDataModule` holds one data set as tensors, asks a :class:`Partitioner` who holds what, and hands out
every client's own view as :class:`ClientData`: :class:`ClientSplit` objects that make loaders.
"""

from pfl_lightning.datamodules.adapters.loaders import FromLoaders
from pfl_lightning.datamodules.adapters.user_data import FromDatasets, FromLightning
from pfl_lightning.datamodules.augmentation.base import Augmentation
from pfl_lightning.datamodules.augmentation.color import ColorJitter, RandomGrayscale
from pfl_lightning.datamodules.augmentation.geometry import RandomCrop, RandomFlip, RandomResizedCrop, RandomRotation
from pfl_lightning.datamodules.augmentation.strong import StrongAugmentation
from pfl_lightning.datamodules.clients.client_data import ClientData
from pfl_lightning.datamodules.clients.parts import BatchLoader, ClientSplit
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.clients.transforms import BatchTransform
from pfl_lightning.datamodules.datasets.domain_folders import DOMAINNET_10, DomainFolders
from pfl_lightning.datamodules.datasets.image_folder import ImageFolder
from pfl_lightning.datamodules.datasets.stl10 import STL10
from pfl_lightning.datamodules.datasets.vision import CIFAR10, CIFAR100, EMNIST, Digits, FashionMNIST
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition import (
    IID,
    ClassesPerClient,
    ClientView,
    ConceptShift,
    DirichletOverClasses,
    DirichletOverClients,
    Domains,
    DominantClasses,
    FeatureShift,
    FromFile,
    Partitioner,
    PartitionError,
    PartitionTransform,
    Quantity,
    class_counts,
    dominant_groups,
    save_partition,
)
from pfl_lightning.datamodules.partition.plot import partition_figure, partition_table, plot_partition

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "DOMAINNET_10",
    "EMNIST",
    "IID",
    "STL10",
    "Augmentation",
    "BatchLoader",
    "BatchTransform",
    "ClassesPerClient",
    "ClientData",
    "ClientSplit",
    "ClientView",
    "ColorJitter",
    "ConceptShift",
    "Digits",
    "DirichletOverClasses",
    "DirichletOverClients",
    "DomainFolders",
    "Domains",
    "DominantClasses",
    "FashionMNIST",
    "FeatureShift",
    "FederatedDataModule",
    "FromDatasets",
    "FromFile",
    "FromLightning",
    "FromLoaders",
    "ImageFolder",
    "PartitionError",
    "PartitionTransform",
    "Partitioner",
    "Quantity",
    "RandomCrop",
    "RandomFlip",
    "RandomGrayscale",
    "RandomResizedCrop",
    "RandomRotation",
    "Samples",
    "StrongAugmentation",
    "class_counts",
    "dominant_groups",
    "partition_figure",
    "partition_table",
    "plot_partition",
    "save_partition",
]
