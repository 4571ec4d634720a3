"""Several data sets of one stage, in the list, dictionary or CombinedLoader in which a project gives their loaders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from pfl_lightning.datamodules.adapters.items import ItemLoader, ItemSplit
from pfl_lightning.lightning_private import combining_mode

EVALUATED: Literal["sequential"] = "sequential"
TRAINED: Literal["max_size_cycle"] = "max_size_cycle"
"""How a Trainer combines loaders, where it is not said."""


class _Leaf:
    """The place of a loader."""


@dataclass(frozen=True)
class StageLoaders:
    """Loaders of one stage.

    Attributes:
        loaders: The loaders, in the order of ``dataloader_idx``.
        shape: How they are combined, with something at the place of each; ``None`` for a single loader as it is.
    """

    loaders: tuple[Any, ...]
    shape: CombinedLoader | None = None

    @property
    def first(self) -> DataLoader[Any]:
        """The first, or the only one."""
        loader: DataLoader[Any] = self.loaders[0]
        return loader

    @classmethod
    def of(cls, given: Any, training: bool) -> StageLoaders:
        """Loaders as a hook of a data module gives them.

        Example:
            >>> found = StageLoaders.of({"a": DataLoader([1]), "b": DataLoader([2])}, training=True)
            >>> len(found.loaders), combining_mode(found.shape)
            (2, 'max_size_cycle')
        """
        while not training and isinstance(given, list | tuple) and len(given) == 1:
            given = given[0]
        if not isinstance(given, list | tuple | dict | CombinedLoader):
            return cls((given,))
        if not isinstance(given, CombinedLoader):
            given = CombinedLoader(given, TRAINED if training else EVALUATED)
        places = CombinedLoader(given.iterables, combining_mode(given))
        places.flattened = [_Leaf() for _ in given.flattened]
        return cls(tuple(given.flattened), places)


class CombinedSplit:
    """One client's items of several data sets.

    Args:
        parts: Its items of each of them.
        shape: How their batches are combined.

    Example:
        >>> import torch
        >>> from torch.utils.data import default_collate
        >>> from pfl_lightning.datamodules.adapters.item_source import BatchSizes, ItemSource
        >>> source = ItemSource([0, 1, 2, 3], default_collate, batches=BatchSizes(2, 2, False))
        >>> parts = [ItemSplit(source, torch.tensor(own), torch.zeros(4)) for own in ([0, 1, 2], [3])]
        >>> shape = StageLoaders.of({"a": DataLoader([0]), "b": DataLoader([0])}, training=True).shape
        >>> for batch in CombinedSplit(parts, shape).loader(2).batches():
        ...     print({name: own.tolist() for name, own in batch.items()})
        {'a': [0, 1], 'b': [3]}
        {'a': [2], 'b': [3]}
    """

    def __init__(self, parts: Sequence[ItemSplit], shape: CombinedLoader) -> None:
        self.parts, self.shape = tuple(parts), shape

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def datamodule(self) -> LightningDataModule | None:
        """Data module whose batch hooks an inner Trainer calls; None for no hooks."""
        return self.parts[0].datamodule

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of items of each data set."""
        return tuple(len(part) for part in self.parts)

    def class_counts(self, num_classes: int) -> Tensor:
        """Number of items of each class in the first data set, shape (C,)."""
        return self.parts[0].class_counts(num_classes)

    def split(self, size: int) -> Iterator[ItemSplit]:
        """Refuse, since batches belong together.

        Raises:
            TypeError: Always.
        """
        raise TypeError("items of several loaders belong together and cannot be split")

    def loader(self, batch_size: int, **options: Any) -> CombinedBatches:
        """Loader of combined batches; every data set has its own loader's sizes.

        Args:
            batch_size: Not used.
            options: See :meth:`ItemSplit.loader`; ``drop_last`` is each loader's own.

        Raises:
            ValueError: Two views are asked for.
        """
        if options.get("views", 1) != 1:
            raise ValueError(
                f"two views of each item are read by one training loader, and there are {len(self.parts)}: give "
                "train_dataloader one loader, or use a method of one view"
            )
        made = []
        for part in self.parts:
            own = part.source.batches
            dropped = own.drop_last and bool(options.get("shuffle"))
            made.append(part.loader(own.batch_size, **{**options, "drop_last": dropped}))
        return CombinedBatches(self.shape, made)


class CombinedBatches(CombinedLoader):
    """Batches of several loaders, combined as a Trainer does, to which this is a CombinedLoader.

    Args:
        shape: How they are combined.
        loaders: The loaders.

    Attributes:
        augmented: Always true, see :class:`ItemLoader`.
    """

    augmented = True

    def __init__(self, shape: CombinedLoader, loaders: Sequence[ItemLoader]) -> None:
        super().__init__(shape.iterables, combining_mode(shape))
        self.flattened = list(loaders)
        self.batch_size = loaders[0].batch_size

    def __len__(self) -> int:
        if self._iterator is None:
            iter(self)
        return super().__len__()

    def batches(self) -> Iterator[Any]:
        """The batches alone; iteration gives the number of the batch and of its loader, too."""
        return (batch for batch, _, _ in self)

    def tensors(self) -> Any:
        """Refuse, as :class:`ItemLoader` does."""
        return self.flattened[0].tensors()

    def with_inputs(self, inputs: Tensor) -> Any:
        """Refuse, as :class:`ItemLoader` does."""
        return self.flattened[0].with_inputs(inputs)
