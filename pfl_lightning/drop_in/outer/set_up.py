"""``setup`` and ``configure_model`` of a user's module, under the outer Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import lightning as L

from pfl_lightning.datamodules.adapters.loading.stages import attached
from pfl_lightning.drop_in.fits.patching import patched

__all__ = ["set_up_by"]


@contextmanager
def set_up_by(module: L.LightningModule, trainer: Any) -> Iterator[None]:
    """Inside, the module has the outer Trainer, and a warning says what its training batches are.

    A module is set up once for all clients, and a schedule laid out by ``estimated_stepping_batches`` there would count
    clients in place of batches.

    Args:
        module: The module, whose ``setup`` is called inside.
        trainer: The outer Trainer; ``None`` for none.
    """
    datamodule: Any = getattr(trainer, "datamodule", None)
    if not hasattr(datamodule, "client_data"):  # none, or data of predictions
        with attached(module, trainer):
            yield
        return
    own = datamodule.train_dataloader

    @wraps(own)
    def train_dataloader() -> Any:
        warnings.warn(
            f"setup or configure_model of {type(module).__name__} asks its Trainer for training batches "
            "(trainer.datamodule.train_dataloader(), trainer.estimated_stepping_batches): there these are the clients "
            "of a round, one each, since the module is set up once for all of them. Ask in configure_optimizers, where "
            "they are the client's own batches, or ask self.trainer.datamodule.datamodule, your data module, for those "
            "of all clients",
            stacklevel=2,
        )
        return own()

    with attached(module, trainer), patched(datamodule, train_dataloader=train_dataloader):
        yield
