"""What a Trainer was given, and a federation in the place of it: all that is used of Lightning's internals for this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from pfl_lightning.older_package import is_older

__all__ = ["GivenData", "attach_logging", "data_given_to", "put_in_place", "trainer_of"]


@dataclass(frozen=True, eq=False)
class GivenData:
    """The data of a call of ``trainer.fit``, ``validate``, ``test`` or ``predict``.

    Attributes:
        datamodule: The data module, if one was given.
        loaders: Loaders that were given, by the names of these arguments of ``trainer.fit`` (``train_dataloaders``).
    """

    datamodule: Any = None
    loaders: Mapping[str, Any] = field(default_factory=dict)

    def is_part_of(self, other: GivenData) -> bool:
        """Whether the same objects were given in another call."""
        return all(other.loaders.get(name) is loader for name, loader in self.loaders.items()) and (
            self.datamodule is None or self.datamodule is other.datamodule
        )

    @property
    def is_for_evaluation(self) -> bool:
        """Whether these are loaders without one for training."""
        return bool(self.loaders) and "train_dataloaders" not in self.loaders


def trainer_of(log: Any) -> L.Trainer:
    """The Trainer that assigns ``log``, a method of the module that it was given, to its callbacks."""
    trainer: L.Trainer = log.__self__.trainer
    return trainer


def data_given_to(trainer: Any, module: Any) -> GivenData:
    """What the call under way was given: the loops hold it, since ``trainer.datamodule`` may be of an earlier call."""
    loops = {
        TrainerFn.FITTING: {
            "train_dataloaders": trainer.fit_loop,
            "val_dataloaders": trainer.fit_loop.epoch_loop.val_loop,
        },
        TrainerFn.VALIDATING: {"val_dataloaders": trainer.validate_loop},
        TrainerFn.TESTING: {"test_dataloaders": trainer.test_loop},
        TrainerFn.PREDICTING: {"predict_dataloaders": trainer.predict_loop},
    }[TrainerFn(trainer.state.fn.value)]
    given = {name: loop._data_source.instance for name, loop in loops.items()}
    given = {name: value for name, value in given.items() if value is not module}
    for value in given.values():
        if isinstance(value, L.LightningDataModule) or is_older(value):
            return GivenData(value)
    return GivenData(loaders=given)


def put_in_place(trainer: Any, module: L.LightningModule, data: Any, **loaders: Any) -> None:
    """Let the call under way go on with another module and other data, as if they had been given.

    It is made when the Trainer has connected the module that it was given and attached its callbacks, and has not yet
    called ``prepare_data`` or ``setup`` of anything.
    """
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, datamodule=data, **loaders)
    trainer._callback_connector._attach_model_callbacks()


def attach_logging(trainer: Any) -> None:
    """Give all callbacks the ``log`` of the module that was put in place, not of the one that was given."""
    trainer._callback_connector._attach_model_logging_functions()
