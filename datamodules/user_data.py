"""Data sets of one's own: a pair of map-style Datasets, or a LightningDataModule."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition_base import Partitioner
from pfl_lightning.datamodules.samples import Samples


class FromDatasets(FederatedDataModule):
    """A training and perhaps a test Dataset, read once into tensors.

    An item is a pair (input, class): the input a picture, a tensor or an array, all of one shape (images as channels,
    height, width; pictures are brought into this order); the class a whole number from 0. Transforms inside the data
    set run once, when it is read.

    Args:
        partition: The rule that says which client holds which samples.
        batch_size: Samples in a training batch.
        train: The training set, map-style.
        test: The test set, map-style; None to split test parts off the training set.
        class_names: A name for each class; None for the data set's own ``classes`` or numbers.
        kwargs: See :class:`FederatedDataModule`.
    """

    def __init__(
        self,
        partition: Partitioner,
        batch_size: int = 50,
        *,
        train: Dataset[Any],
        test: Dataset[Any] | None = None,
        class_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(partition, batch_size, **kwargs)
        self.train = train
        self.test = test
        self.given_names = class_names

    def __getstate__(self) -> dict[str, Any]:
        """Without the data sets once they are read."""
        read = {"train": None, "test": None} if self._ready is not None else {}
        return {**super().__getstate__(), **read}

    def load(self) -> Samples:
        """Read every item once.

        Raises:
            TypeError: If a data set is not map-style, or an item is not a pair (input, class).
            ValueError: If items differ in shape.
        """
        return read_datasets(self.train, self.test, self.given_names)


class FromLightning(FederatedDataModule):
    """A LightningDataModule of one's own: the Datasets behind its training and test loaders, read once into tensors.

    The test set is that of ``test_dataloader``, else of ``val_dataloader``, else it is split off the training set.
    Only the loaders' data sets are used: batch size, order and collating are those of this module.

    Args:
        partition: The rule that says which client holds which samples.
        batch_size: Samples in a training batch.
        datamodule: The module.
        class_names: A name for each class; None for the data set's own ``classes`` or numbers.
        kwargs: See :class:`FederatedDataModule`.
    """

    def __init__(
        self,
        partition: Partitioner,
        batch_size: int = 50,
        *,
        datamodule: LightningDataModule,
        class_names: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(partition, batch_size, **kwargs)
        self.datamodule = datamodule
        self.given_names = class_names

    def __getstate__(self) -> dict[str, Any]:
        """Without the module once it is read."""
        read = {"datamodule": None} if self._ready is not None else {}
        return {**super().__getstate__(), **read}

    def load(self) -> Samples:
        """Prepare the module and read its data sets once.

        Raises:
            TypeError: If a loader is not a single DataLoader over a map-style data set.
        """
        own = self.datamodule
        own.prepare_data()
        own.setup("fit")
        train = _dataset_of(own.train_dataloader(), "train_dataloader")
        test = None
        if is_overridden("test_dataloader", own, LightningDataModule):
            own.setup("test")
            test = _dataset_of(own.test_dataloader(), "test_dataloader")
        elif is_overridden("val_dataloader", own, LightningDataModule):
            test = _dataset_of(own.val_dataloader(), "val_dataloader")
        return read_datasets(train, test, self.given_names)


def read_datasets(train: Dataset[Any], test: Dataset[Any] | None, class_names: Sequence[str] | None) -> Samples:
    """Read a training and a test Dataset into tensors.

    Args:
        train: The training set.
        test: The test set, if there is one.
        class_names: A name for each class; None for the data set's own ``classes`` or numbers.
    """
    inputs, targets = read_dataset(train, "training set")
    test_inputs, test_targets = (None, None) if test is None else read_dataset(test, "test set")
    highest = int(max(targets.max(), -1 if test_targets is None else test_targets.max()))
    names = class_names if class_names is not None else getattr(train, "classes", None)
    if names is None or (class_names is None and len(names) <= highest):
        names = range(highest + 1)
    return Samples(inputs, targets, tuple(str(name) for name in names), test_inputs, test_targets)


def read_dataset(dataset: Dataset[Any], what: str) -> tuple[Tensor, Tensor]:
    """Read a map-style Dataset into tensors.

    Args:
        dataset: The data set.
        what: Its name in errors.

    Returns:
        Inputs of shape (N, ...), pictures as unsigned bytes (N, C, H, W), and int64 classes of shape (N,).

    Raises:
        TypeError: If it is not map-style, or an item is not a pair (input, class).
        ValueError: If it is empty or items differ in shape.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"the {what} is a {type(dataset).__name__}, which cannot be indexed: clients hold index lists, so give a "
            "map-style Dataset with __len__ and __getitem__"
        )
    items: Any = dataset
    if len(items) == 0:
        raise ValueError(f"the {what} is empty")
    inputs: list[Tensor] = []
    targets: list[int] = []
    for place in range(len(items)):
        value, target = _read_item(items[place], f"item {place} of the {what}")
        if inputs and (value.shape != inputs[0].shape or value.dtype != inputs[0].dtype):
            raise ValueError(
                f"item {place} of the {what} is {value.dtype} of shape {tuple(value.shape)}, item 0 "
                f"{inputs[0].dtype} of shape {tuple(inputs[0].shape)}: all must be the same; "
                "resize them in the data set's transform"
            )
        inputs.append(value)
        targets.append(target)
    if any(not _same(_read_item(items[place], what)[0], inputs[place]) for place in range(min(8, len(items)))):
        warnings.warn(
            f"the {what} gives another input each time it is asked: a random transform in it is frozen, as items are "
            "read once. Take the transform out and set augment, which draws anew for every batch",
            stacklevel=2,
        )
    stacked = torch.stack(inputs)
    stacked = stacked.float() if stacked.dtype == torch.float64 else stacked
    broken = _broken(stacked) if stacked.is_floating_point() else []
    if broken:
        warnings.warn(
            f"{len(broken)} of {len(stacked)} items of the {what} have values that are not finite (the first: item "
            f"{broken[0]}): NaN, infinite, or too large for {stacked.dtype}. They are kept as they are; a client "
            "that trains on them may be left out of the federation",
            stacklevel=2,
        )
    return stacked, torch.tensor(targets, dtype=torch.int64)


def _broken(inputs: Tensor) -> list[int]:
    """The inputs with values that are not finite, without a loop over single inputs."""
    finite = [part.reshape(len(part), -1).isfinite().all(dim=1) for part in inputs.split(1024)]
    return torch.cat(finite).logical_not().nonzero().flatten().tolist()


def _same(one: Tensor, two: Tensor) -> bool:
    """Whether two inputs are equal, NaN counting as equal to NaN."""
    return one.shape == two.shape and bool(((one == two) | (one.isnan() & two.isnan())).all())


def _read_item(item: Any, where: str) -> tuple[Tensor, int]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise TypeError(f"{where} is a {type(item).__name__}, expected a pair (input, class)")
    value, target = item
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
    elif isinstance(value, np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(value))
    elif hasattr(value, "getbands"):  # a PIL picture
        pixels = np.array(value)
        tensor = torch.from_numpy(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    else:
        raise TypeError(f"the input in {where} is a {type(value).__name__}, expected a picture, a tensor or an array")
    whole = isinstance(target, (int, np.integer)) or (
        isinstance(target, (Tensor, np.ndarray)) and target.shape in ((), (1,)) and float(target) == int(target)
    )
    if not whole:
        raise TypeError(f"the class in {where} is {target!r}, expected a whole number from 0")
    return tensor, int(target)


def _dataset_of(loader: Any, name: str) -> Dataset[Any]:
    while isinstance(loader, (list, tuple)) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise TypeError(f"{name} gives a {type(loader).__name__}, expected a single DataLoader")
    return loader.dataset
