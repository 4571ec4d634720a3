"""``setup`` and ``configure_model`` of a user's module, under the outer Trainer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import lightning as L

from pfl_lightning.data import FederatedData
from pfl_lightning.drop_in.fits.module_calls import names_in_code, patched
from pfl_lightning.lightning_private import attached

__all__ = ["set_up_by", "warn_of_pooled_numbers"]


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


def warn_of_pooled_numbers(
    module: L.LightningModule, changed: Iterable[str], data: FederatedData, epochs: int | None
) -> None:
    """Warn of numbers that a module keeps, or reads from its data module, and that count the items of all clients.

    A schedule that is laid out by ``self.steps = len(loader)`` in ``train_dataloader``, or by a number of items that
    the data module has counted, would be that of a plain run, and a client has fewer batches.

    Args:
        module: The module, set up.
        changed: Names of the attributes that its hooks have set.
        data: The data.
        epochs: ``max_epochs`` of the outer Trainer.
    """
    counts: Mapping[int, str] = getattr(data, "pooled_numbers", {})
    if not counts:
        return
    own, read = getattr(data, "datamodule", None), names_in_code(module)
    looked_at = [(module, name) for name in sorted(changed)]
    looked_at += [] if own is None else [(own, name) for name in vars(own) if name in read]
    known = {number * times for number in counts for times in (1, epochs or 1)}
    found = [
        f"{type(owner).__name__}.{name} = {value:g}"
        for owner, name in looked_at
        for value in _numbers(vars(owner).get(name))
        if value in known or any(n > 1 and math.isclose(value, 1 / n) for n in known)
    ]
    if found:
        sizes, first = "; ".join(f"{number} {what}" for number, what in counts.items()), data.participating[0]
        warnings.warn(
            f"{'; '.join(dict.fromkeys(found))}: made before there are clients, from the data of all ({sizes}), "
            f"of which client {first} has {len(data.client_data(first).train)} training items. A "
            "schedule by such a number is too slow. In configure_optimizers and later hooks "
            "len(self.trainer.train_dataloader), self.trainer.num_training_batches and "
            "self.trainer.estimated_stepping_batches are the client's own",
            stacklevel=2,
        )


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif type(value) in (list, tuple, dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part)
