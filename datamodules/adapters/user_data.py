"""Adapters of user-defined data that are read once into tensors: Datasets, or a LightningDataModule."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from pfl_lightning.data import LABEL_KEYS, checked_length
from pfl_lightning.datamodules.adapters.labels import check_numbered_alike, names_of_classes
from pfl_lightning.datamodules.adapters.sources import selection_of
from pfl_lightning.datamodules.clients.samples import Samples
from pfl_lightning.datamodules.clients.splits import NO_LABEL
from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.datasets.images import to_bytes
from pfl_lightning.datamodules.module import FederatedDataModule
from pfl_lightning.datamodules.partition.base import Partitioner
from pfl_lightning.datamodules.partition.given import AsGiven, clients_of
from pfl_lightning.older_package import as_lightning
from pfl_lightning.options import DataOptions, Unpack

INPUT_KEYS = ("image", "img", "input", "inputs", "pixel_values", "x")
"""Keys of the input in items that are dictionaries."""

NUMBERS = tuple(map(np.dtype, ("?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8")))
"""Types of arrays that torch has, too, under every version of NumPy."""

COLORS = (1, 3, 4)
"""Numbers of channels of a picture."""

Keys = tuple[str, str]
"""Keys of the input and of the class."""


class FromDatasets(FederatedDataModule):
    """Training Dataset, and optionally a test and an unlabeled Dataset, read once into tensors.

    An item is a pair (input, class), or a dictionary with both, as those of Hugging Face's ``datasets``. The input is a
    picture, a tensor or an array, all of one shape (images as channels, height, width; pictures are converted to this
    order). The class is a whole number from 0. Transforms inside the data set run once, when it is read.

    Only self-supervised methods use unlabeled samples, and only for training.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        train: The training set, map-style.
        test: The test set, map-style; None to hold out test samples from the training set.
        unlabeled: Unlabeled samples, map-style: an item is an input, or a tuple that begins with one.
        class_names: A name for each class; None for the data set's own ``classes`` or numbers.
        keys: Keys of the input and of the class in items that are dictionaries, such as ``("img", "fine_label")``; None
            for the usual names (``image``, ``img``, ``pixel_values``, ...; ``label``, ``labels``, ``target``, ...).
        clients: Whose each training item is, in the place of ``partition``: whole numbers, or names of clients.
        test_clients: Whose each test item is; None for test items in the class proportions that a client trains on.
        kwargs: See :class:`FederatedDataModule`.

    Raises:
        ValueError: If neither ``partition`` nor ``clients`` is given, or both, or ``clients`` do not fit the items.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from pfl_lightning.datamodules import IID, FromDatasets
        >>> train = TensorDataset(torch.rand(60, 3, 8, 8), torch.arange(60) % 10)
        >>> test = TensorDataset(torch.rand(20, 3, 8, 8), torch.arange(20) % 10)
        >>> data = FromDatasets(IID(num_clients=3), train=train, test=test, validation_share=0.0)
        >>> data.setup()
        >>> data.num_classes, data.input_shape, [len(data.client_data(client).train) for client in range(3)]
        (10, (3, 8, 8), [20, 20, 20])
        >>> data = FromDatasets(train=train, clients=["Lyon", "Nice", "Nice"] * 20)
        >>> data.client_names
        ('Lyon', 'Nice')
    """

    read_once = ("train", "test", "unlabeled")

    def __init__(
        self,
        partition: Partitioner | None = None,
        batch_size: int = 50,
        *,
        # Without a type of items: of a data set in a config the parser would otherwise take no options.
        train: Dataset,  # type: ignore[type-arg]
        test: Dataset | None = None,  # type: ignore[type-arg]
        unlabeled: Dataset | None = None,  # type: ignore[type-arg]
        class_names: Sequence[str] | None = None,
        keys: tuple[str, str] | None = None,
        clients: Sequence[int | str] | None = None,
        test_clients: Sequence[int | str] | None = None,
        **kwargs: Unpack[DataOptions],
    ) -> None:
        if (partition is None) == (clients is None):
            raise ValueError("FromDatasets needs either partition, such as IID(num_clients=10), or clients")
        self._clients: tuple[Ints, Ints | None] = np.empty(0, dtype=np.int64), None
        if clients is not None:
            given = {"clients": (clients, train), "test_clients": (test_clients, test)}
            for name, (owners, dataset) in given.items():
                if owners is not None and (dataset is None or len(owners) != len(dataset)):  # type: ignore[arg-type]
                    raise ValueError(
                        f"{name} must have an entry for each item of the data set, got {len(owners)} for "
                        f"{0 if dataset is None else len(dataset)} items"  # type: ignore[arg-type]
                    )
            numbers, partition = clients_of([*clients, *(() if test_clients is None else test_clients)])
            own, tested = np.split(numbers, [len(clients)])
            self._clients = own, None if test_clients is None else tested
        assert partition is not None
        super().__init__(partition, batch_size, **kwargs)
        self.train, self.test, self.unlabeled = train, test, unlabeled
        self.keys, self.given_names = keys, class_names

    def load(self) -> Samples:
        """Read every item once.

        Raises:
            TypeError: If a data set is not map-style, or an item has an unexpected type.
            ValueError: If items differ in shape.
        """
        samples = read_datasets(self.train, self.test, self.given_names, self.keys)
        if isinstance(self.partition, AsGiven):
            own, tested = (None if one is None else torch.from_numpy(one) for one in self._clients)
            samples = replace(samples, train_clients=own, test_clients=tested)
        if self.unlabeled is None:
            return samples
        inputs, _ = read_dataset(self.unlabeled, "unlabeled set", labeled=False, keys=self.keys)
        return replace(samples, unlabeled_inputs=inputs)


class FromLightning(FederatedDataModule):
    """LightningDataModule whose training and test Datasets are read once into tensors.

    The test set is that of ``test_dataloader``, else of ``val_dataloader``; without both, test samples are held out
    from the training set. Only the loaders' data sets are used (of a SubsetRandomSampler or a list of places, its part
    of one): batch size, order and collating are those of this module. :class:`FromLoaders` keeps the loaders' settings
    instead.

    Args:
        partition: Rule that assigns the samples to clients.
        batch_size: Samples in a training batch.
        datamodule: The data module to divide.
        class_names: A name for each class; None for the data set's own ``classes`` or numbers.
        kwargs: See :class:`FederatedDataModule`.

    Example:
        >>> import torch
        >>> from lightning.pytorch import LightningDataModule
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from pfl_lightning.datamodules import IID, FromLightning
        >>> class Project(LightningDataModule):
        ...     def train_dataloader(self):
        ...         return DataLoader(TensorDataset(torch.rand(60, 4), torch.arange(60) % 3))
        ...     def val_dataloader(self):
        ...         return DataLoader(TensorDataset(torch.rand(30, 4), torch.arange(30) % 3))
        >>> data = FromLightning(IID(num_clients=3), batch_size=10, datamodule=Project(), validation_share=0.0)
        >>> data.setup()
        >>> len(data.client_data(0).train), len(data.client_data(0).test)
        (20, 20)
    """

    read_once = ("datamodule",)

    def __init__(
        self,
        partition: Partitioner,
        batch_size: int = 50,
        *,
        datamodule: LightningDataModule,
        class_names: Sequence[str] | None = None,
        **kwargs: Unpack[DataOptions],
    ) -> None:
        super().__init__(partition, batch_size, **kwargs)
        self.datamodule = as_lightning(datamodule)
        self.given_names = class_names

    def load(self) -> Samples:
        """Prepare the wrapped data module and read its data sets once.

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


def _dataset_of(loader: Any, name: str) -> Dataset[Any]:
    while isinstance(loader, (list, tuple)) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise TypeError(f"{name} gives a {type(loader).__name__}, expected a single DataLoader")
    places = selection_of(loader)
    return loader.dataset if places is None else Subset(loader.dataset, places)


def read_datasets(
    train: Dataset[Any], test: Dataset[Any] | None, class_names: Sequence[str] | None, keys: Keys | None = None
) -> Samples:
    """Read a training and a test Dataset into tensors.

    Args:
        train: The training set.
        test: The test set, if there is one.
        class_names: A name for each class; None for the data set's own ``classes`` or numbers.
        keys: See :func:`read_dataset`.

    Returns:
        The samples; without test samples if ``test`` is None.
    """
    inputs, targets = read_dataset(train, "training set", keys=keys)
    test_inputs, test_targets = (None, None) if test is None else read_dataset(test, "test set", keys=keys)
    sets = {"training set": targets.numpy()} | ({} if test_targets is None else {"test set": test_targets.numpy()})
    if test is not None:
        check_numbered_alike(train, test)
    names = names_of_classes(class_names, train, sets, refuse=True)
    return Samples(inputs, targets, names, test_inputs, test_targets)


def read_dataset(
    dataset: Dataset[Any], what: str, *, labeled: bool = True, keys: Keys | None = None
) -> tuple[Tensor, Tensor]:
    """Read a map-style Dataset into tensors.

    Args:
        dataset: The data set.
        what: Its name in errors.
        labeled: Whether an item is a pair (input, class); otherwise an input, or a tuple that begins with one.
        keys: Keys of the input and of the class in items that are dictionaries; None for the usual names.

    Returns:
        Inputs of shape (N, ...), pictures as unsigned bytes (N, C, H, W), and int64 classes of shape (N,), -1 without
        labels.

    Raises:
        TypeError: If the data set is not map-style, or an item has an unexpected type.
        ValueError: If the data set is empty or items differ in shape.

    Example:
        >>> items = [(np.zeros((2, 2), dtype=np.float32), 3), (np.ones((2, 2), dtype=np.float32), 5)]
        >>> inputs, targets = read_dataset(items, "training set")
        >>> inputs.shape, targets.tolist()
        (torch.Size([2, 2, 2]), [3, 5])
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"the {what} is a {type(dataset).__name__}, which cannot be indexed: clients hold index lists, so give a "
            "map-style Dataset with __len__ and __getitem__"
        )
    items: Any = dataset

    def read(place: int) -> tuple[Tensor, int]:
        where = f"item {place} of the {what}"
        value, target = _parts(items[place], keys, labeled, where)
        return _as_tensor(value, where), target

    number = checked_length(items, what)
    if (whole := _columns(items, keys, labeled, what)) is not None:
        read(0)  # refuses what no item may be
        return _single(whole[0]), whole[1]
    inputs: list[Tensor] = []
    targets: list[int] = []
    for place in range(number):
        try:
            value, target = read(place)
        except Exception as error:  # of the user's own code, which may not say which file it has read
            error.add_note(f"while item {place} of the {what} was read")
            raise
        if inputs and (value.shape != inputs[0].shape or value.dtype != inputs[0].dtype):
            raise ValueError(
                f"item {place} of the {what} is {value.dtype} of shape {tuple(value.shape)}, item 0 "
                f"{inputs[0].dtype} of shape {tuple(inputs[0].shape)}: all must be the same; in the data set, resize "
                "pictures and convert them to one mode (image.convert('RGB')), and pad rows to one length, or use "
                "federate with a LightningModule of your own, whose loaders pad in their collate_fn"
            )
        inputs.append(value)
        targets.append(target)
    again = ((read(place)[0], inputs[place]) for place in range(min(8, len(items))))
    if not all(bool(((one == other) | one.isnan() & other.isnan()).all()) for one, other in again):
        warnings.warn(
            f"the {what} gives a different input each time it is read: a random transform in it is frozen, as items "
            "are read once. Remove the transform and set augment, which draws again for every batch",
            stacklevel=2,
        )
    return _single(torch.stack(inputs)), torch.tensor(targets, dtype=torch.int64)


def _single(inputs: Tensor) -> Tensor:
    return inputs.float() if inputs.dtype == torch.float64 else inputs


def _columns(dataset: Any, keys: Keys | None, labeled: bool, what: str) -> tuple[Tensor, Tensor] | None:
    """Inputs and classes of all items where the data set holds them so, not copied; None where items are to be read.

    Known are TensorDatasets, data sets of Hugging Face in the format of NumPy or torch, and parts of both.
    """
    if type(dataset) is Subset:
        whole, places = _columns(dataset.dataset, keys, labeled, what), torch.as_tensor(dataset.indices)
        return None if whole is None else (whole[0][places], whole[1][places])
    form = getattr(dataset, "format", None)
    if type(dataset) is TensorDataset:
        found = dataset.tensors
    elif isinstance(form, Mapping) and form.get("type") in ("numpy", "torch"):
        found = _entries(dataset[:], keys, labeled, f"item 0 of the {what}")
    else:
        return None
    arrays = [one for one in found[: 1 + labeled] if isinstance(one, Tensor) or getattr(one, "dtype", None) in NUMBERS]
    if len(arrays) <= labeled or (labeled and len(found) != 2):
        return None
    readable = (one if isinstance(one, Tensor) or one.flags.writeable else one.copy() for one in arrays)
    inputs, *given = (torch.as_tensor(one).detach().cpu() for one in readable)
    classes = given[0].flatten() if labeled else torch.full((len(inputs),), NO_LABEL)
    fits = len(classes) == len(inputs) and not classes.is_complex() and bool((classes == classes.long()).all())
    return (inputs, classes.long()) if fits else None


def _entries(item: Any, keys: Keys | None, labeled: bool, where: str) -> Any:
    """The entries of the input and of the class, if an item is a dictionary."""
    if isinstance(item, Mapping):
        wanted = [(key,) for key in keys] if keys else [INPUT_KEYS, LABEL_KEYS]
        found = [[key for key in names if key in item] for names in wanted[: 2 if labeled else 1]]
        if any(len(names) != 1 for names in found):
            raise TypeError(
                f"{where} has the entries {[*item]}: say which are the input and the class, such as "
                "keys=('image', 'label')"
            )
        item = [item[names[0]] for names in found]
    return item


def _parts(item: Any, keys: Keys | None, labeled: bool, where: str) -> tuple[Any, int]:
    """Input and class of an item."""
    item = _entries(item, keys, labeled, where)
    if not labeled:
        return item[0] if isinstance(item, tuple | list) and item else item, NO_LABEL
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise TypeError(f"{where} is a {type(item).__name__}, expected a pair (input, class)")
    value, target = item
    whole = isinstance(target, int | np.integer) or (
        isinstance(target, Tensor | np.ndarray)
        and target.shape in ((), (1,))
        and (isinstance(target, Tensor) or target.dtype.kind in "biuf")  # and no string
        and float(target).is_integer()
    )
    if not whole:
        raise TypeError(f"the class in {where} is {target!r}, expected a whole number from 0")
    return value, int(target)


def _as_tensor(value: Any, where: str) -> Tensor:
    """An input; pictures get their channels first.

    Raises:
        TypeError: It is neither a picture nor a tensor nor an array.
        ValueError: It is a picture of bytes whose channels stand last: its columns would be taken for colors.
    """
    if hasattr(value, "getbands"):  # a PIL picture
        pixels = np.array(to_bytes(value))
        return torch.from_numpy(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    if not isinstance(value, Tensor | np.ndarray):
        raise TypeError(f"the input in {where} is a {type(value).__name__}, expected a picture, a tensor or an array")
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)  # of which torch warns where it cannot be written to
        value = torch.from_numpy(array if array.flags.writeable else array.copy())
    shape = tuple(value.shape)
    if value.dtype == torch.uint8 and len(shape) == 3 and shape[2] in COLORS and shape[0] not in COLORS:
        raise ValueError(
            f"the input in {where} has the shape {shape}, an image with channels last: convert it to (channels, "
            "height, width), with array.transpose(2, 0, 1) or tensor.permute(2, 0, 1)"
        )
    tensor: Tensor = value.detach().cpu()
    return tensor
