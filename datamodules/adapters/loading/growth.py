"""Whether a project's training items are as many as when they were divided among clients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.datamodules.adapters.loading.stages import GivenLoaders, checked

__all__ = ["warn_of_other_items"]


def warn_of_other_items(
    datamodule: LightningDataModule, divided: Sequence[Any], items: Sequence[int], trainer: Any
) -> None:
    """Warn if a further fit would have another number of training items in a plain run.

    Args:
        datamodule: The data module.
        divided: The training Datasets that were divided.
        items: Their numbers of items then.
        trainer: The Trainer of the fit.
    """
    found = [len(dataset) for dataset in divided]
    if found == list(items) and not isinstance(datamodule, GivenLoaders):
        found = _items_now(datamodule, trainer) or found
    if found == list(items):
        return
    name = "the training loader" if isinstance(datamodule, GivenLoaders) else type(datamodule).__name__
    now = " and ".join(map(str, found))
    warnings.warn(
        f"{name} has {now} training items now, and had {' and '.join(map(str, items))} when they were divided "
        "among the clients, which go on with those: for the new ones to count, give another instance with them, which "
        "is divided again (with federate: call it again)",
        stacklevel=2,
    )


def _items_now(datamodule: LightningDataModule, trainer: Any) -> list[int]:
    """Numbers of items of the training loaders that a plain fit would get now; none where they cannot be asked for.

    A shallow copy is asked: the data module goes on with the Datasets that the clients have.
    """
    own = copy.copy(datamodule)
    own.trainer = trainer
    with isolate_rng():
        try:
            own.setup("fit")
            return [
                len(loader.dataset) for loader in checked(own.train_dataloader(), "train_dataloader", False).loaders
            ]
        except Exception:  # whatever the user's code raises
            return []
