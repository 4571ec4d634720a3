"""Loaders of a project that are asked for once more between rounds: ``reload_dataloaders_every_n_epochs``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pfl_lightning.datamodules.adapters.loaders import FromLoaders
from pfl_lightning.datamodules.adapters.loading.combined import StageLoaders
from pfl_lightning.datamodules.adapters.loading.stages import checked
from pfl_lightning.datamodules.adapters.sources import source_of
from pfl_lightning.seeding import Purpose, derive_seed, python_seed, torch_seed

__all__ = ["Reloading"]

_HOOKS = {"train": "train_dataloader", "validation": "val_dataloader"}


class Reloading:
    """Asks a project's data module for its loaders again before every n-th round, as a plain Trainer does.

    Every client keeps the places of the items that it has; what lies there is what the new Datasets have.

    Args:
        every: Rounds between two readings; 0 for none.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._last = 0

    def before(self, round: int, data: Any, trainer: Any) -> None:
        """Let a round begin.

        Args:
            round: The round, from 0.
            data: The federation's data.
            trainer: The Trainer, whose epoch the data module may ask for.

        Raises:
            ValueError: The Datasets have other lengths than before.
        """
        if not self.every:
            return
        due = round // self.every * self.every  # the reading that a run without an interruption has now
        is_new, self._last = due not in (0, self._last), due
        if not isinstance(data, FromLoaders):
            if round == 0:
                warnings.warn(
                    f"Trainer(reload_dataloaders_every_n_epochs={self.every}) has no effect on a "
                    f"{type(data).__name__}, whose loaders are asked for once",
                    stacklevel=2,
                )
        elif is_new:
            seed = derive_seed(data.seed, Purpose.RELOAD, due)
            with torch_seed(seed), python_seed(seed), _in_epoch(due, trainer):
                _reload(data, trainer)


@contextmanager
def _in_epoch(epoch: int, trainer: Any) -> Iterator[None]:
    """Let a Trainer that was resumed be in the epoch in which an uninterrupted one asks."""
    progress = trainer.fit_loop.epoch_progress.current
    before = progress.processed, progress.completed  # current_epoch is the one or the other, by Lightning's version
    progress.processed = progress.completed = epoch
    try:
        yield
    finally:
        progress.processed, progress.completed = before


def _reload(data: FromLoaders, trainer: Any) -> None:
    own = data.datamodule
    for stage, hook in _HOOKS.items():
        if stage not in data._sources:
            continue
        before, own.trainer = own.trainer, trainer
        try:
            found = checked(getattr(own, hook)(), hook, False)
        finally:
            own.trainer = before
        if all(new is old for new, old in zip(found.loaders, data._stages[stage].loaders, strict=False)):
            continue
        new = tuple(source_of(loader, own, stage) for loader in found.loaders)
        sizes = [[len(source.dataset) for source in sources] for sources in (data._sources[stage], new)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{hook} gave {sizes[0]} items at first and gives {sizes[1]} in round {trainer.current_epoch + 1}, and "
                "clients have places in the first: keep the length, or leave reload_dataloaders_every_n_epochs out"
            )
        for source in data._sources[stage]:
            if source.workers is not None:
                source.workers.close()
        data._stages[stage] = found
        data._sources[stage] = new
        if stage == "train":
            _train(data, found)


def _train(data: FromLoaders, found: StageLoaders) -> None:
    """Take what else is known of the training loader."""
    sizes = data._sources["train"][0].batches
    assert data._held is not None
    assert sizes is not None
    if data._held.workers is not None:
        data._held.workers.close()
    data._held = replace(source_of(found.first, data.datamodule, "train"), order=None)
    data.batch_size, data.drop_last = sizes.batch_size, sizes.drop_last
