"""What clients have of a user-defined data set, and the base of the data modules whose samples are its items."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pfl_lightning.datamodules.adapters.item_source import BatchSizes, ItemSource
from pfl_lightning.datamodules.adapters.items import ItemSplit, OwnItems
from pfl_lightning.datamodules.module import FederatedDataModule

__all__ = ["ClientItems", "ItemDataModule"]


@dataclass(frozen=True)
class ClientItems:
    """Splits of one client.

    Attributes:
        train: Training items.
        validation: Validation items; may be empty.
        test: Test items; may be empty.
        batches: The client's own settings of batches; ``None`` for those of the data module, which hold for all.
    """

    train: ItemSplit
    validation: ItemSplit
    test: ItemSplit
    batches: BatchSizes | None = None

    @property
    def train_and_unlabeled(self) -> ItemSplit:
        """Training items, which are all there are."""
        return self.train


class ItemDataModule(FederatedDataModule):
    """Base of the data modules whose samples are items of a user-defined data set."""

    _labeled: bool

    @abstractmethod
    def sources(self) -> Iterator[ItemSource]:
        """The data sets with their loaders' settings."""

    @property
    def divided_datasets(self) -> list[Any]:
        """The Datasets that are divided, each once for each of its sources."""
        found = (source.dataset for source in self.sources())
        return [dataset.dataset if isinstance(dataset, OwnItems) else dataset for dataset in found]

    def release(self) -> None:
        """End the processes that read items; they are started again when they are needed."""
        for source in self.sources():
            for owner in (source.workers, source.loader):
                if owner is not None:
                    owner.close()

    def teardown(self, stage: str) -> None:
        """End the processes that read items."""
        self.release()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Refuse, since items may have any shape.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{type(self).__name__} has items of any kind, without a known shape: an encoder needs FromLightning or "
            "FromDatasets"
        )

    @property
    def num_classes(self) -> int:
        """Number of classes C; 0 if items have no class, or it is not known without reading them."""
        return len(self.class_names) if self._labeled else 0
