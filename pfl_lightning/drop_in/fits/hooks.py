"""What a project has inside local fits beside its module: callbacks and loggers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L

from pfl_lightning.client import FederatedClient
from pfl_lightning.drop_in.fits.added_layers import KeepsAdded
from pfl_lightning.drop_in.fits.inner_trainer import Trainer
from pfl_lightning.drop_in.fits.loggers import OuterRun
from pfl_lightning.drop_in.fits.results_in_place import keep_results_in_place
from pfl_lightning.drop_in.outer.local_callbacks import copies, sees_evaluations
from pfl_lightning.engines.tasks import MakeTrainer

__all__ = ["LocalHooks"]


class LocalHooks:
    """Callbacks of inner Trainers, and loggers that pass on to those of the outer Trainer.

    One for all clients: copies of a client share it. A worker process gets the callbacks, and no loggers.

    Args:
        callbacks: Those that were given for local fits.

    Attributes:
        given: Those.
        moved: Callbacks of the outer Trainer that run inside, too.
        added: Names of the layers that callbacks add to the module.
        outer: The outer Trainer and its turn.
    """

    def __init__(self, callbacks: Sequence[L.Callback] = ()) -> None:
        self.given, self.moved = list(callbacks), list[L.Callback]()
        self.added: tuple[str, ...] = ()
        self.outer = OuterRun()

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalHooks:
        return self

    @property
    def callbacks(self) -> list[L.Callback]:
        """All callbacks of local fits."""
        return [*self.given, *self.moved]

    def trainer_of_fit(
        self, make_trainer: MakeTrainer, client: FederatedClient, callbacks: Sequence[Any], **options: Any
    ) -> Any:
        """An inner Trainer that fits a client's module; learning rates become the client's logged values."""
        own = copies(self.callbacks)
        options |= self.outer.options(client.step_module, own, client.logged_metrics)
        kept = [KeepsAdded(client.step_module, self.added)] if self.added else []
        return self._made(make_trainer, [*own, *self.outer.callbacks(), *kept, *callbacks], options)

    def trainer_of_evaluation(
        self, make_trainer: MakeTrainer, module: L.LightningModule, callbacks: Sequence[Any], **options: Any
    ) -> Any:
        """An inner Trainer that validates or tests a module; ``None`` where the engine has none."""
        own = copies(filter(sees_evaluations, self.callbacks))
        options |= self.outer.options(module, own, {})
        kept = [KeepsAdded(module, self.added, own)] if own else []
        trainer = self._made(make_trainer, [*own, *self.outer.callbacks(), *kept, *callbacks], options)
        if trainer is not None:
            trainer.evaluates = True
        return trainer

    def _made(self, make_trainer: MakeTrainer, callbacks: Sequence[Any], options: dict[str, Any]) -> Any:
        trainer = make_trainer(callbacks, kind=Trainer, **options)
        if isinstance(trainer, Trainer):
            trainer.outer_run = self.outer
            keep_results_in_place(trainer)
        return trainer
