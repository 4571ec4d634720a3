"""Hooks of the outer Trainer that a federation of a user's module passes on, and where callbacks belong."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import Tensor

from pfl_lightning.drop_in.fits.inner_trainer import LocalHooks, keep_results_in_place
from pfl_lightning.drop_in.outer.handed_in import HandedOptions, check_epochs, sort_callbacks
from pfl_lightning.drop_in.outer.shown_model import ShowsGlobalModel
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.outer_callbacks import call_with_options
from pfl_lightning.lightning_private import LOG_GRAPH, trainer_or_none

__all__ = ["OuterHooks"]


class OuterHooks(ShowsGlobalModel):
    """Hands callbacks into local fits, and tells these about the outer Trainer."""

    local: LocalHooks
    """Callbacks and loggers of local fits."""

    handed: HandedOptions
    """Options of the outer Trainer that hold in local fits."""

    @property
    def has_inner_trainers(self) -> bool:
        """Whether local fits have a Trainer."""
        return bool(getattr(self.engine, "engine", self.engine).gives_trainer)

    def hand_in(self, own: list[L.Callback]) -> list[L.Callback]:
        """Take those callbacks that belong inside local fits from the outer Trainer, until it is done.

        Args:
            own: Callbacks that the module configures itself.

        Returns:
            The rest of them.
        """
        trainer: Any = self.trainer
        self._give_back()
        # Lightning does it for those that are returned. Under FederatedLoop(method=...) they were attached before, too.
        replaced = tuple({kind for each in own for kind in type(each).__mro__} - {*L.Callback.__mro__})
        trainer.callbacks = [each for each in trainer.callbacks if each in own or type(each) not in replaced]
        self.local.moved = sort_callbacks([*trainer.callbacks, *own], self.has_inner_trainers, own)
        # Another list: the Trainer may go through the one that it has.
        self._taken = [callback for callback in trainer.callbacks if callback in self.local.moved]
        trainer.callbacks = [callback for callback in trainer.callbacks if callback not in self._taken]
        return [callback for callback in own if callback not in self.local.moved]

    def _give_back(self) -> None:
        taken, self._taken = self._taken, []
        if taken and trainer_or_none(self) is not None:
            trainer: Any = trainer_or_none(self)
            trainer.callbacks = [*taken, *trainer.callbacks]

    _taken: list[L.Callback] = []  # noqa: RUF012  # replaced, never changed

    def setup(self, stage: str) -> None:
        """Build the clients; inside, the outer Trainer's loggers are known from now on."""
        super().setup(stage)
        self.local.outer.trainer = self.trainer
        keep_results_in_place(self.trainer)  # a round has several values of every client
        self._log_graphs()

    def _log_graphs(self) -> None:
        """Send the graph of the author's module, not of the federation, to loggers that would ask for one next."""
        for logger in self.trainer.loggers:
            if getattr(logger, LOG_GRAPH, False):
                logger.log_graph(self.shown)
                self.handed.keep(logger, LOG_GRAPH, False)

    def on_fit_start(self) -> None:
        """Start the engine, where callbacks inside local fits can have an effect."""
        client = self.clients.models[0]
        continues = bool(getattr(getattr(client, "continuity", None), "continues", False))
        trainer: Any = self.trainer
        call = call_with_options(trainer.callbacks)
        check_epochs(self.local.callbacks, [phase.epochs for phase in client.phases()], continues, call)
        super().on_fit_start()

    def on_test_start(self) -> None:
        """Start the engine.

        Raises:
            ConfigurationError: No client has test data; a plain Trainer refuses such a call, too.
        """
        if not any(len(self.data.client_data(client).test) for client in self.data.evaluated_clients()):
            raise ConfigurationError(
                "trainer.test needs test data, and no client has any: give the data module or the module a "
                "test_dataloader, or give the loader to this call (with FederatedLoop(method=...)) or to federate(..., "
                "test_dataloaders=...); trainer.validate evaluates clients on their validation data"
            )
        super().on_test_start()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        """It is the client's turn."""
        self.local.outer.turn(int(batch[0]), batch_idx)

    def on_validation_batch_start(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        """It is the client's turn."""
        self.local.outer.turn(int(batch[0]), batch_idx)

    on_test_batch_start = on_validation_batch_start

    def stop_engine(self) -> None:
        """Stop the engine, and give the outer Trainer its callbacks back."""
        super().stop_engine()
        self.local.outer.trainer = None
        self._give_back()
        self.handed.give_back()
