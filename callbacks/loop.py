"""The callback of users: it drives the rounds and, given a method, makes the federation of a project."""

from __future__ import annotations

from typing import Any

import lightning as L

from pfl_lightning.datamodules import FederatedDataModule
from pfl_lightning.drop_in.forms.callback_form import CallbackForm
from pfl_lightning.drop_in.outer.federation import ModuleFederation
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.loop import RoundLoop
from pfl_lightning.lightning_private import attach_logging, trainer_of


class FederatedLoop(RoundLoop):
    """Samples the cohort of every round, sends and collects the messages, and lets the server aggregate.

    An epoch of the Trainer is a round. The server aggregates after the last client of the round, before the validation.

    Args:
        cohort: How many clients take part in a round: a share of all (a float in (0, 1], rounded up) or a number.
            Novel clients of the data module are not counted: they never take part.
        full_participation_in_last_round: Whether all clients take part in the last round (round ``max_epochs``).
        min_clients: A round in which fewer updates than this can be aggregated is undone; a first one ends the run.
        eval_cohort: How many clients are evaluated after a round of a fit, a share or a number as for ``cohort``: a
            random sample, the same in all rounds and after a resume. ``validate`` and ``test`` evaluate all clients.
        stop_on_divergence: Whether the run ends after a round in which the training diverges; see
            :class:`~pfl_lightning.federation.divergence.DivergenceGuard`, which warns in any case.
        max_update_ratio: An update that lies farther from what the server sent than so many times the median of the
            round so far and of the last one is left out; ``None`` takes all. See
            :class:`~pfl_lightning.state.update_norms.UpdateGuard`.
        on_client_error: What an exception of a client's own code or data in a local fit does: ``"skip"`` costs the
            client its round, with the traceback in the log; ``"raise"`` ends the run, as any does before a first good
            round.
        method: A class of :mod:`pfl_lightning.methods`, a partial of one, or its name or import path. With it the
            Trainer is given a LightningModule and data as they are, and the federation is made of them. Without it the
            Trainer is given a Federation.
        options: With a method: the options of :func:`~pfl_lightning.federate`, such as ``num_clients``, and
            hyper-parameters of the method.

    Example:
        >>> L.Trainer(callbacks=[FederatedLoop(method=FedPer, num_clients=10)])  # doctest: +SKIP
    """

    def __init__(
        self,
        cohort: int | float = 1.0,
        full_participation_in_last_round: bool = False,
        min_clients: int = 1,
        eval_cohort: int | float = 1.0,
        stop_on_divergence: bool = False,
        max_update_ratio: float | None = 1000.0,
        on_client_error: str = "skip",
        method: Any = None,
        **options: Any,
    ) -> None:
        if method is None and options:
            raise ConfigurationError(
                f"FederatedLoop got {', '.join(sorted(options))} and no method: add one, such as "
                "FederatedLoop(method=FedPer, num_clients=10), or give these options to the Federation"
            )
        trust = (stop_on_divergence, max_update_ratio, on_client_error)
        super().__init__(cohort, full_participation_in_last_round, min_clients, eval_cohort, *trust)
        self._form = None if method is None else CallbackForm(method, **options)
        self._is_in_place = False
        self._log: Any = None

    @property
    def makes_federations(self) -> bool:
        """Whether the loop has a method, and so makes federations."""
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

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Drive the federation; let all callbacks log where this one has put it in place."""
        if self._is_in_place:
            attach_logging(trainer)
        super().setup(trainer, pl_module, stage)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Warn with which weights clients are evaluated, where that may be a mistake."""
        if self._form is not None:
            self._form.begin_evaluation(trainer, pl_module)

    on_test_start = on_validation_start

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Warn of parts that no client has trained in the model that predicts."""
        if self._form is not None:
            self._form.begin_predictions(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """End the Trainer's call."""
        self._leave()
        super().teardown(trainer, pl_module, stage)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """End the Trainer's call; Lightning calls no ``teardown`` after an error."""
        self._leave()
        super().on_exception(trainer, pl_module, exception)

    def _leave(self) -> None:
        self._is_in_place = False
        if self._form is not None:
            self._form.leave()
