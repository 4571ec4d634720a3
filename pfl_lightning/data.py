"""Interfaces of the data of a client and of a federation, as methods and engines see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sized
from typing import Any, NamedTuple, Protocol, TypedDict

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pfl_lightning.errors import ConfigurationError, NoSuchClientError
from pfl_lightning.names import did_you_mean
from pfl_lightning.options import Unpack

__all__ = ["LABEL_KEYS", "BatchSource", "ClientParts", "FederatedData", "LoaderOptions", "SplitSource", "TwoViews"]
__all__ += ["checked_length", "class_of_batch", "client_number", "names_of", "to_device", "usual_augmentations"]

_COPIES: MutableMapping[Tensor, dict[torch.device, Tensor | None]] = WeakIdKeyDictionary()
"""Copies on devices, which end with what they are copies of."""

LABEL_KEYS = ("label", "labels", "target", "targets", "y")
"""Keys of the class in items and batches that are dictionaries."""

MAX_ITEMS = 1_000_000_000
"""Items of a data set above which its length is taken for that of one without an end."""


class TwoViews(NamedTuple):
    """One batch under two draws of a data set's own transforms.

    Attributes:
        first: The batch, as a user's step takes it.
        second: The same items, read once more.
    """

    first: Any
    second: Any


class BatchSource(Protocol):
    """Batches of one epoch at each iteration (see ``pfl_lightning.datamodules.BatchLoader``)."""

    augmented: bool

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]: ...

    def __len__(self) -> int: ...

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All inputs (n, ...) and labels (n,), in the part's own order, not augmented."""

    def with_inputs(self, inputs: Tensor) -> BatchSource:
        """The same batches, in the same order, over other inputs (n, ...)."""

    def with_values(self, values: Tensor) -> BatchSource:
        """The same batches, in the same order, each with the values (n, ...) of its samples behind the labels."""


class LoaderOptions(TypedDict, total=False):
    """Options of a loader, which are described in :class:`pfl_lightning.datamodules.BatchLoader`."""

    device: torch.device | str
    generator: torch.Generator | None
    shuffle: bool
    drop_last: bool
    augment: bool
    views: int


class SplitSource(Protocol):
    """One client's samples of one kind (see ``pfl_lightning.datamodules.ClientSplit``)."""

    @property
    def datamodule(self) -> LightningDataModule | None:
        """Data module whose hooks apply to the batches; ``None`` for the package's own data."""

    def __len__(self) -> int: ...

    def class_counts(self, num_classes: int) -> Tensor:
        """Samples of each class, (C,)."""

    def split(self, size: int) -> Iterator[SplitSource]:
        """Consecutive pieces of at most ``size`` samples."""

    def loader(self, batch_size: int, **options: Unpack[LoaderOptions]) -> BatchSource:
        """Batches on a device."""


class ClientParts(Protocol):
    """A client's training, validation and test parts (see ``pfl_lightning.datamodules.ClientData``)."""

    @property
    def train(self) -> SplitSource:
        """Samples for the training."""

    @property
    def validation(self) -> SplitSource:
        """Samples for the selection of hyperparameters and rounds."""

    @property
    def test(self) -> SplitSource:
        """Samples for the final evaluation."""

    @property
    def train_and_unlabeled(self) -> SplitSource:
        """Samples for the training of methods that use unlabeled data, which has the class -1."""


class FederatedData(Protocol):
    """Interface of a federation's data module (see ``pfl_lightning.datamodules.FederatedDataModule``)."""

    num_clients: int
    num_classes: int
    input_shape: tuple[int, ...]
    batch_size: int
    eval_batch_size: int
    drop_last: bool
    augment: bool
    novel: list[int]

    @property
    def fingerprint(self) -> str:
        """Hash that identifies the partition."""

    @property
    def participating(self) -> list[int]:
        """Clients that take part in the training; the others are in ``novel``."""

    def client_data(self, client: int) -> ClientParts:
        """Training, validation and test parts of one client."""

    def read_whole(self) -> None:
        """Hold all samples as tensors, if they are items of any kind until then."""

    def current_cohort(self) -> list[int]:
        """Clients of the current round, in the order of the training loader."""

    def evaluated_clients(self) -> list[int]:
        """The clients that are evaluated, in the order of the validation and test loaders."""


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Values on a device, those of the CPU by a copy that the CPU does not wait for."""
    if values.device.type == "cpu" and device.type in ("cuda", "xpu"):
        values = values.pin_memory()  # else the copy waits
    return values.to(device, non_blocking=True)


def copy_on(device: torch.device, values: Tensor) -> Tensor | None:
    """A copy of a data set's values that stays on a GPU for as long as they are there.

    Args:
        device: The GPU.
        values: All values of the data set, which nobody changes in place.

    Returns:
        The copy; ``None`` on other devices, and where it would take more than a quarter of the memory that is free.
    """
    held = _COPIES.setdefault(values, {})
    if device not in held:
        with torch.inference_mode(False):
            held[device] = values.to(device) if 0 < values.nbytes <= free_memory(device) // 4 else None
    return held[device]


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU; 0 of other devices."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def names_of(data: FederatedData) -> tuple[str, ...]:
    """A name for each client; empty where clients have numbers alone."""
    return tuple(getattr(data, "client_names", None) or ())


def label_map_of(data: FederatedData, client: int) -> tuple[int, ...] | None:
    """A client's number of each class; ``None`` where it is the data's, and with rules that are not the package's."""
    seen_by = getattr(getattr(data, "partition", None), "client_view", None)
    return None if seen_by is None else seen_by(client, data.num_classes).label_map


def usual_augmentations(data: FederatedData) -> tuple[Any, ...]:
    """Augmentations that ``augment=True`` selects in a data module.

    Raises:
        ConfigurationError: It has none: a project's own data, or samples that are no images.
    """
    found = tuple(getattr(type(data), "augmentations", ()))
    if not found or len(data.input_shape) != 3:
        raise ConfigurationError(
            f"personalize.augment: {type(data).__name__} has no default crops and flips, which only the package's "
            "own image data modules have; your own transforms apply without it"
        )
    return found


def client_number(data: FederatedData, client: int | str) -> int:
    """The number of a client that is called by its number, or by its name where the data have ``client_names``.

    Raises:
        NoSuchClientError: There is no such client; it says which there are.
    """
    names = names_of(data)
    number: Any = names.index(client) if client in names else client
    if isinstance(number, str) and number.isdecimal():  # of a command line
        number = int(number)
    if isinstance(number, str) or not 0 <= number < data.num_clients:
        known = f"0 to {data.num_clients - 1}" + (f", or {names[0]!r} to {names[-1]!r}" if names else "")
        raise NoSuchClientError(f"there is no client {client}{did_you_mean(str(client), names)}; clients are {known}")
    return int(number)


def checked_length(dataset: Sized, what: str) -> int:
    """Number of items of a map-style data set, after a check that it has some, and an end.

    Args:
        dataset: The data set.
        what: Its name in errors.

    Raises:
        ValueError: If it is empty, or has more items than any data set.
    """
    length = len(dataset)
    if length == 0:
        raise ValueError(f"the {what} is empty")
    if length > MAX_ITEMS:
        raise ValueError(f"the {what} has a length of {length}: give it a __len__ that is its number of items")
    return length


def class_of_batch(batch: Any) -> Tensor | None:
    """Classes of a batch (inputs, classes), or of a dictionary with one of ``LABEL_KEYS``; ``None`` if it has none.

    Those of a batch of graphs (of torch_geometric) are its ``y``, where that has one number for each graph.

    Example:
        >>> import torch
        >>> from pfl_lightning.data import class_of_batch
        >>> class_of_batch((torch.zeros(2, 5), torch.tensor([3, 1])))
        tensor([3, 1])
        >>> class_of_batch({"image": torch.zeros(2, 5), "label": torch.tensor([3, 1])})
        tensor([3, 1])
        >>> class_of_batch((torch.zeros(2, 5), torch.tensor([0.5, 0.1]))) is None  # no integers: a regression
        True
    """
    if isinstance(batch, Mapping):
        found = [batch[key] for key in LABEL_KEYS if key in batch]
    elif isinstance(batch, tuple | list):
        found = [batch[1]] if len(batch) == 2 else []
    else:
        found = _of_graphs(batch)
    if len(found) != 1 or not isinstance(found[0], Tensor):
        return None
    whole = not (found[0].is_floating_point() or found[0].is_complex() or found[0].dtype == torch.bool)
    return found[0] if whole and found[0].ndim == 1 else None


def _of_graphs(batch: Any) -> list[Any]:
    """The ``y`` of graphs; not that of their nodes, which may be of another part of the data."""
    count, found = getattr(batch, "num_graphs", None), getattr(batch, "y", None)
    return [found] if isinstance(found, Tensor) and found.ndim and len(found) == count else []
