"""Hooks of the outer Trainer that a federation passes on to the user's module, and into local fits."""

from __future__ import annotations

from typing import Any, cast

import lightning as L
from torch import Tensor

from pfl_lightning.data import FederatedData
from pfl_lightning.datamodules.adapters.stages import brings
from pfl_lightning.drop_in.fits.inner_trainer import LocalHooks, keep_results_in_place
from pfl_lightning.drop_in.outer.handed_in import HandedOptions, sort_callbacks
from pfl_lightning.drop_in.outer.shown_model import ShowsGlobalModel
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.lightning_private import attached, data_given_to, put_in_place, trainer_or_none
from pfl_lightning.older_package import as_older, as_written, is_older
from pfl_lightning.seeding import Purpose, derive_seed, torch_seed
from pfl_lightning.state.checkpoints import FEDERATION, as_module_would_write

MODULE_CONTENT = "pfl_lightning_module"
"""Key of what the module itself has put into a checkpoint."""


class UserHooks(ShowsGlobalModel):
    """Calls what the module has for the stages of a run, on the copies that clients train; hands callbacks in."""

    local: LocalHooks
    """Callbacks and loggers of local fits."""

    handed: HandedOptions
    """Options of the outer Trainer that hold in local fits, and hooks that are others until the run ends."""

    _taken: list[L.Callback] = []  # noqa: RUF012  # replaced, never changed
    _stages_seen: frozenset[str] | set[str] = frozenset()
    _last_data: FederatedData | None = None

    def __getstate__(self) -> dict[str, Any]:
        """State without data."""
        return {**super().__getstate__(), "_last_data": None}

    @property
    def stage_name(self) -> str:
        """The stage as Lightning tells ``setup``: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""
        return "fit" if trainer_or_none(self) is None else trainer_or_none(self).state.fn or "fit"

    @property
    def data(self) -> FederatedData:
        """The Trainer's data module, or the last one: predictions may be of other data."""
        datamodule = getattr(trainer_or_none(self), "datamodule", None)
        if self._last_data is not None and not hasattr(datamodule, "client_data"):
            return self._last_data
        return super().data

    # ------------------------------------------------------------------ callbacks of local fits

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

    def on_test_start(self) -> None:
        """Start the engine.

        Raises:
            ConfigurationError: No client has test data; a plain Trainer refuses such a call, too.
        """
        if not any(len(self.data.client_data(client).test) for client in self.data.evaluated_clients()):
            raise ConfigurationError(
                "trainer.test needs test data, and no client has any: add a test_dataloader to the data module or the "
                "module, to this call (under FederatedLoop(method=...)) or to federate, or use trainer.validate"
            )
        super().on_test_start()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        """It is the client's turn."""
        self.local.outer.turn(int(batch[0]), batch_idx)

    on_validation_batch_start = on_test_batch_start = on_train_batch_start

    # ------------------------------------------------------------------ stages

    def prepare_data(self) -> None:
        """Call the module's own."""
        with attached(self.given_module, trainer_or_none(self)):
            self.given_module.prepare_data()

    def setup(self, stage: str) -> None:
        """Build the clients, or call the module's own ``setup`` for a stage that they have not seen."""
        before = self.is_set_up
        super().setup(stage)
        self.local.outer.trainer = self.trainer  # whose loggers are known inside
        keep_results_in_place(self.trainer)  # a round has several values of every client
        self._last_data = self.data
        if not before:
            self._stages_seen = {stage}
        adapts = bool(self.clients.models[0].personalization_phases()) or self._personalization is not None
        # Clients that adapt before they are evaluated train.
        wanted = ["fit", stage] if adapts and stage != "fit" else [stage]
        missing = [one for one in wanted if one not in self._stages_seen]
        self._stages_seen = {*self._stages_seen, *missing}
        if missing and brings(self.given_module, "setup"):
            with torch_seed(derive_seed(self.seed, Purpose.INITIAL_WEIGHTS)):
                self.owner.set_up(missing, trainer_or_none(self), self._networks())
            self._shown = None

    def teardown(self, stage: str) -> None:
        """Stop the engine, let the module that was given hold the global model, and call the module's own."""
        super().teardown(stage)
        if not self.is_set_up:
            return
        self.trainer.precision_plugin.convert_module(self.given_module)  # as a plain fit does with "bf16-true"
        self.owner.take(self.global_model())
        if brings(self.given_module, "teardown"):
            with attached(self.given_module, trainer_or_none(self)):
                self.given_module.teardown(stage)
        self.owner.end_call()

    def _networks(self) -> list[Any]:
        """The copies that clients train, as they were before any of them; what is done to them now holds for all."""
        return list(cast(Any, self.clients.models[0].user_module).networks_as_given(for_all=True))

    def stop_engine(self) -> None:
        """Stop the engine, and give the outer Trainer its callbacks and options back; hooks are the federation's."""
        super().stop_engine()
        self.local.outer.trainer = None
        self._give_back()
        self.handed.give_back()

    # ------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write what a plain run of the module would write, for ``load_from_checkpoint``, and the federation apart."""
        added: dict[str, Any] = {}
        if brings(self.given_module, "on_save_checkpoint"):
            before = self._content_for_module(checkpoint)
            content = dict(before)
            self.shown.on_save_checkpoint(content)
            state = content.pop("state_dict", before["state_dict"])  # of which it may leave out or rename parts
            added = {key: value for key, value in content.items() if before.get(key) is not value}
            checkpoint[MODULE_CONTENT] = added
        else:
            state = (self.global_model() if self._shown is None else self.shown).state_dict()
        super().on_save_checkpoint(checkpoint)
        as_module_would_write(checkpoint, state, added)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Give the module's own hook what it had added.

        Raises:
            CheckpointError: The checkpoint is of something else.
        """
        saved = {"state_dict": checkpoint["state_dict"]} if FEDERATION in checkpoint else {}
        super().on_load_checkpoint(checkpoint)
        if not brings(self.given_module, "on_load_checkpoint"):
            return
        content = {**self._content_for_module(checkpoint), **saved, **checkpoint.get(MODULE_CONTENT, {})}
        for module in (self.given_module, *self._networks(), *([] if self._shown is None else [self._shown.module])):
            module.on_load_checkpoint({**content, "state_dict": dict(content["state_dict"])})

    def _content_for_module(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """What the module finds in a checkpoint of itself: the global model under its own names, and counters."""
        kept = ("epoch", "global_step", "pytorch-lightning_version")
        found = {key: checkpoint[key] for key in kept if key in checkpoint}
        return {**found, "state_dict": self.shown.state_dict(), "hyper_parameters": dict(self.given_module.hparams)}

    # ------------------------------------------------------------------ predictions

    def predict_by_module(self) -> None:
        """Let a prediction use the global model in place of the federation, and the project's own data."""
        trainer, module = self.trainer, self.shown
        given = data_given_to(trainer, self)
        if self._shown is not None:
            self._shown.values = None  # it may be given the weights of a checkpoint
        if not isinstance(trainer, L.Trainer):
            as_written(module)
            if not is_older(module):
                as_older(module)
        put_in_place(trainer, module, getattr(given.datamodule, "datamodule", given.datamodule), **given.loaders)
