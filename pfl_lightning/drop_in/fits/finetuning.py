"""Lightning's ``BaseFinetuning`` inside local fits: what it has thawed stays thawed in a client's later fits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning as L
from torch.optim import Optimizer

from pfl_lightning.drop_in.fits.module_calls import flat_objects
from pfl_lightning.federation.outer_callbacks import lightning_kinds

__all__ = ["thaw_again"]


def thaw_again(configured: Any, callbacks: Iterable[L.Callback], module: L.LightningModule, epochs: int) -> Any:
    """Let ``BaseFinetuning`` callbacks do again what they did at the epochs of a client's earlier local fits.

    Every local fit has a new copy of them, which freezes the module, and new optimizers without the groups that were
    added. It comes before the optimizers take over their rates and states, so that those of added groups have a place.

    Args:
        configured: What ``configure_optimizers`` has returned, whose optimizers get the groups.
        callbacks: Those of the inner Trainer.
        module: The client's module.
        epochs: How many local epochs the client has had.

    Returns:
        ``configured``.
    """
    tuning: list[Any] = [callback for callback in callbacks if "BaseFinetuning" in lightning_kinds(callback)]
    optimizers = [found for found in flat_objects(configured) if isinstance(found, Optimizer)]
    for callback in tuning:
        for epoch in range(epochs):
            for optimizer in optimizers:
                callback.finetune_function(module, epoch, optimizer)
    return configured
