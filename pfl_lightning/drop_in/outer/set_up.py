"""``setup`` and ``configure_model`` of a user's module, under the outer Trainer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import lightning as L

from pfl_lightning.data import FederatedData
from pfl_lightning.drop_in.fits.module_calls import names_in_code, patched
from pfl_lightning.lightning_private import attached

__all__ = ["OF_LOADERS", "set_up_by", "warn_of_pooled_numbers"]

OF_LOADERS = "the hooks that make its loaders"
_LOADER_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader")


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
    module: L.LightningModule, places: Mapping[str, str], data: FederatedData, epochs: int | None
) -> None:
    """Warn of numbers that a module keeps, or reads from its data module, and that count the items of all clients.

    A schedule that is laid out by ``self.steps = len(loader)`` in ``train_dataloader``, or by a number of items that
    the data module has counted, would be that of a plain run, and a client has fewer batches.

    Args:
        module: The copy of the module that clients train, set up.
        places: Where it has got its attributes from, by their names.
        data: The data.
        epochs: ``max_epochs`` of the outer Trainer.
    """
    counts: Mapping[int, str] = getattr(data, "pooled_numbers", {})
    if not counts:
        return
    found, constants = [], _constants_beside_len(module)
    for name, place in places.items():
        for value in _numbers(vars(module).get(name)):
            what = _counted(value, counts, epochs or 1)
            if what is None and place == OF_LOADERS and constants is not None and value not in constants:
                what = "computed"
            if what is not None:
                found.append(f"{type(module).__name__}.{name} = {value:g} ({what}, set in {place})")
    own = getattr(data, "datamodule", None)
    read = names_in_code(module)
    for name, value in vars(own).items() if own is not None else ():
        what = _counted(value, counts, epochs or 1) if name in read and list(_numbers(value)) else None
        if what is not None:
            found.append(f"{type(own).__name__}.{name} = {value:g} ({what})")
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


def _counted(value: int | float, counts: Mapping[int, str], epochs: int) -> str | None:
    """What a number counts: items or batches, in one epoch or in all, or what it is one of so many of."""
    for number, what in counts.items():
        for times, where in ((1, ""), (epochs, f" in {epochs} epochs")):
            if value == number * times:
                return f"the {what} of all clients{where}"
            if number > 1 and isinstance(value, float) and math.isclose(value, 1 / (number * times)):
                return f"one divided by the {what} of all clients{where}"
    return None


def _constants_beside_len(module: L.LightningModule) -> set[Any] | None:
    """Constants in the hooks that make the module's loaders, where one of them asks for a length; else ``None``."""
    codes = [getattr(getattr(type(module), name), "__code__", None) for name in _LOADER_HOOKS]
    found = {each for code in codes if code is not None for each in code.co_consts if isinstance(each, int | float)}
    return found if any("len" in code.co_names for code in codes if code is not None) else None
