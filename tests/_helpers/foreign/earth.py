"""torchgeo's trainers: they schedule by ReduceLROnPlateau on their own val_loss."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from _helpers.foreign.made_data import Dictionaries, loaders, masks, pictures
from _helpers.foreign.project import Made, Project


def labeled(items: int, seed: int) -> Dataset[Any]:
    inputs, classes = pictures(items, seed, size=32)
    return Dictionaries(image=inputs, label=classes)


def several_labels(items: int, seed: int) -> Dataset[Any]:
    inputs, classes = pictures(items, seed, size=32)
    return Dictionaries(image=inputs, label=torch.stack([classes, 1 - classes, classes], 1))


def measured(items: int, seed: int) -> Dataset[Any]:
    inputs, _ = pictures(items, seed, size=32)
    return Dictionaries(image=inputs, label=inputs.mean((1, 2, 3)))


def masked(items: int, seed: int) -> Dataset[Any]:
    inputs, _ = pictures(items, seed, size=32)
    return Dictionaries(image=inputs, mask=masks(inputs))


def classification() -> Made:
    from torchgeo.trainers import ClassificationTask

    return ClassificationTask("resnet10t", weights=None, num_classes=2, patience=0), loaders(labeled)


def multilabel() -> Made:
    from torchgeo.trainers import ClassificationTask

    task = ClassificationTask("resnet10t", weights=None, task="multilabel", num_labels=3, loss="bce", patience=0)
    return task, loaders(several_labels)


def regression() -> Made:
    from torchgeo.trainers import RegressionTask

    return RegressionTask("resnet10t", weights=None, num_outputs=1, in_channels=3), loaders(measured)


def segmentation() -> Made:
    from torchgeo.trainers import SemanticSegmentationTask

    return SemanticSegmentationTask("fcn", in_channels=3, num_classes=2, num_filters=4), loaders(masked)


def _task(kind: str, name: str, data: str, make: Any, **options: Any) -> Project:
    return Project(kind, "torchgeo", name, data, make, ("torchgeo",), slow=True, **options)


PROJECTS = [
    _task("earth observation", "ClassificationTask", "dictionaries: image, label", classification, head="model.fc"),
    _task(
        "several labels", "ClassificationTask, multilabel", "dictionaries: image, labels", multilabel, head="model.fc"
    ),
    _task("regression of images", "RegressionTask", "dictionaries: image, number", regression, head="model.fc"),
    _task("segmentation", "SemanticSegmentationTask", "dictionaries: image, mask", segmentation),
]
