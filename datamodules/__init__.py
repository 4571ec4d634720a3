"""Data of a federation: data sets, partition rules, augmentations and the clients' splits.

A :class:`FederatedDataModule` holds one data set as tensors. A :class:`Partitioner` assigns its samples to the clients.
:meth:`FederatedDataModule.client_data` gives one client's :class:`ClientData`: its train, validation and test
:class:`ClientSplit`, each of which makes loaders.

- ``module``: :class:`FederatedDataModule`, the base of all data sets.
- ``datasets/``: published data sets (:class:`CIFAR10`, :class:`STL10`, ...), folders of images, and tables
  (:class:`FromTable`).
- ``adapters/``: your own Datasets, DataLoaders and DataModules (:class:`FromDatasets`, :class:`FromLoaders`),
  divided already or not (:class:`FromSilos`).
- ``partition/``: partition rules (:class:`IID`, :class:`DirichletOverClients`, ...), partition files and figures.
- ``clients/``: the clients' splits, batches, views and normalization.
- ``augmentation/``: random augmentation of whole batches.
- ``counting``: integer arithmetic that the partition rules share, and index lists of all clients in one array.
- ``draws``: random draws of many clients at once.

Example:
    >>> from pfl_lightning.datamodules import Digits, DirichletOverClients
    >>> data = Digits(DirichletOverClients(num_clients=5, alpha=0.5), batch_size=32)
    >>> data.setup()
    >>> data.num_classes, data.input_shape
    (10, (1, 8, 8))
    >>> inputs, targets = next(iter(data.client_data(0).train.loader(batch_size=16)))
    >>> inputs.shape, targets.shape
    (torch.Size([16, 1, 8, 8]), torch.Size([16]))
"""

from pfl_lightning.datamodules.adapters.leaf import FromLEAF
from pfl_lightning.datamodules.adapters.loaders import FromLoaders
from pfl_lightning.datamodules.adapters.silos import FromSilos
from pfl_lightning.datamodules.adapters.user_data import FromDatasets, FromLightning
from pfl_lightning.datamodules.augmentation.color import ColorJitter, RandomGrayscale, StrongAugmentation
from pfl_lightning.datamodules.augmentation.geometry import RandomCrop, RandomFlip, RandomResizedCrop, RandomRotation
from pfl_lightning.datamodules.augmentation.ops import Augmentation
from pfl_lightning.datamodules.clients.batches import BatchLoader, BatchTransform
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.clients.splits import ClientData, ClientSplit
from pfl_lightning.datamodules.clients.views import ClientView
from pfl_lightning.datamodules.counting import class_counts
from pfl_lightning.datamodules.datasets.client_folders import ClientFolders
from pfl_lightning.datamodules.datasets.image_folder import DOMAINNET_10, DomainFolders, ImageFolder
from pfl_lightning.datamodules.datasets.table import FromTable
from pfl_lightning.datamodules.datasets.vision import CIFAR10, CIFAR100, EMNIST, STL10, Digits, FashionMNIST
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError
from pfl_lightning.datamodules.partition.dirichlet import DirichletOverClasses, DirichletOverClients
from pfl_lightning.datamodules.partition.domains import Domains
from pfl_lightning.datamodules.partition.file import FromFile, save_partition
from pfl_lightning.datamodules.partition.plot import partition_figure, partition_table, plot_partition
from pfl_lightning.datamodules.partition.rules import IID, ClassesPerClient, DominantClasses, dominant_groups
from pfl_lightning.datamodules.partition.transform import ConceptShift, FeatureShift, PartitionTransform, Quantity

__all__ = ["FederatedDataModule", "FromDatasets", "FromLEAF", "FromLightning", "FromLoaders", "FromSilos", "FromTable"]
__all__ += ["CIFAR10", "CIFAR100", "EMNIST", "STL10", "Digits", "FashionMNIST"]
__all__ += ["DOMAINNET_10", "ClientFolders", "DomainFolders", "ImageFolder"]
__all__ += ["BatchLoader", "BatchTransform", "ClientData", "ClientSplit", "ClientView", "Samples", "class_counts"]
__all__ += ["IID", "ClassesPerClient", "DirichletOverClasses", "DirichletOverClients", "Domains", "DominantClasses"]
__all__ += ["ConceptShift", "FeatureShift", "FromFile", "PartitionError", "PartitionTransform", "Partitioner"]
__all__ += ["Quantity", "dominant_groups", "partition_figure", "partition_table", "plot_partition", "save_partition"]
__all__ += ["Augmentation", "ColorJitter", "RandomCrop", "RandomFlip", "RandomGrayscale"]
__all__ += ["RandomResizedCrop", "RandomRotation", "StrongAugmentation"]
