"""A callback that a Trainer gets in the place of :func:`~pfl_lightning.drop_in.federate.federate`."""

from __future__ import annotations

from typing import Any

import lightning as L

from pfl_lightning.datamodules import FederatedDataModule
from pfl_lightning.drop_in.forms.callback_form import CallbackForm
from pfl_lightning.drop_in.forms.trainer_data import attach_logging, trainer_of
from pfl_lightning.drop_in.outer.federation import ModuleFederation
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.older_package import also_older

__all__ = ["ProjectCallback"]


class ProjectCallback(L.Callback):
    """A callback that makes the federation of a project, if it is given a method.

    Args:
        method: See :class:`CallbackForm`; ``None`` for a Trainer that is given a Federation.
        options: See :class:`CallbackForm`.

    Raises:
        ConfigurationError: There is no such method, or no such option.
    """

    def __init__(self, method: Any = None, **options: Any) -> None:
        if method is None and options:
            raise ConfigurationError(
                f"FederatedLoop has no option {', '.join(sorted(options))} without a method, such as "
                "FederatedLoop(method=FedPer, num_clients=10)"
            )
        also_older(self)
        self._form = None if method is None else CallbackForm(method, **options)
        self._is_in_place = False
        self._log: Any = None

    @property
    def makes_federations(self) -> bool:
        """Whether it has a method."""
        return self._form is not None

    @property
    def federation(self) -> ModuleFederation | None:
        """The federation that was made of the Trainer's module; ``None`` before, and without a method."""
        return None if self._form is None else self._form.federation

    @property
    def data(self) -> FederatedDataModule | None:
        """The data of :attr:`federation`."""
        return None if self._form is None else self._form.data

    # A Trainer assigns it to every callback in a call of fit, validate, test or predict, as soon as it knows its module
    # and before anything is set up: every hook of module, data and callbacks is then called once, and in the usual
    # order. In `setup` the data would have been prepared already, and would be once more.
    @property
    def log(self) -> Any:
        """The ``log`` of the Trainer's module."""
        return self._log

    @log.setter
    def log(self, log: Any) -> None:
        self._log = log
        if self._form is not None and not self._is_in_place:
            self._is_in_place = True
            if self._form.take_over(trainer_of(log)):
                self.begin()

    def begin(self) -> None:
        """Forget the rounds of another federation."""

    def follow(self, trainer: L.Trainer) -> None:
        """In ``setup``: let all callbacks log where this one has put a federation in place."""
        if self._is_in_place:
            attach_logging(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say with which weights clients are evaluated, where that may be a mistake."""
        if self._form is not None:
            self._form.begin_evaluation(trainer, pl_module)

    on_test_start = on_validation_start

    def leave(self) -> None:
        """The Trainer's call is over."""
        self._is_in_place = False
        if self._form is not None:
            self._form.leave()
