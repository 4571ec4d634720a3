"""A federation in which every client trains a user's LightningModule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.parsing import AttributeDict

from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData, names_of
from pfl_lightning.datamodules.adapters.stages import brings, gives
from pfl_lightning.drop_in.client.parts import ClientParts
from pfl_lightning.drop_in.client.plain_state import plain_state
from pfl_lightning.drop_in.client.user_module import UserModule, bare_name
from pfl_lightning.drop_in.fits.inner_trainer import LocalHooks
from pfl_lightning.drop_in.fits.over_rounds import Continuity
from pfl_lightning.drop_in.outer.handed_in import HandedOptions, check_local
from pfl_lightning.drop_in.outer.logs_over_clients import LogsOverClients
from pfl_lightning.drop_in.outer.traveling import AveragedBuffers, what_travels
from pfl_lightning.drop_in.outer.user_hooks import UserHooks
from pfl_lightning.drop_in.outer.user_module_owner import UserModuleOwner
from pfl_lightning.drop_in.predictions import NamesUnsharedParts
from pfl_lightning.engines import Engine, TrainerEngine
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.evaluation import Scores
from pfl_lightning.federation.outer_callbacks import call_with_options, check_options
from pfl_lightning.federation.set_up import missing_callbacks
from pfl_lightning.learner import MakeOptimizer
from pfl_lightning.lightning_private import hyperparameters_of, trainer_or_none
from pfl_lightning.messages import State
from pfl_lightning.phases import Personalization
from pfl_lightning.privacy import ClientPrivacy
from pfl_lightning.robust import Robust
from pfl_lightning.seeding import Purpose, derive_seed, torch_seed
from pfl_lightning.state.checkpoints import python_numbers


class ModuleFederation(UserHooks):
    """A federation of clients that train a LightningModule as its author wrote it; see :func:`federate`.

    When a fit, a validation or a test is over, the module that was given holds the global model: what the server would
    send (to client 0, where it sends each client weights of its own, as in FedPAC), and its own first values in the
    parts that never travel.

    Args:
        module: The module. Clients train copies; it gives their first weights.
        parts: Makes the clients.
        loop: What drives the rounds, unless the Trainer has a FederatedLoop among its callbacks.
        monitor: A value that the module logs, of which mean, deviation, least and greatest value over the clients are
            logged, too; of a name that begins with ``val`` also that with ``test`` in its place.
        local_callbacks: Callbacks that run inside local fits.
        engine: How local fits run; ``None`` is :class:`~pfl_lightning.engines.TrainerEngine`, in which every hook of
            Lightning holds.
        continuity: What a client's local fit keeps of its last one.
        seed: Seed of everything random.
        server_optimizer: Makes the optimizer of the server.
        privacy: Client-level differential privacy.
        robust: Rule against lying clients.
    """

    tests_in_fits = False
    takes_items = True

    def __init__(
        self,
        module: L.LightningModule,
        parts: ClientParts,
        *,
        loop: L.Callback,
        monitor: str | None,
        local_callbacks: Sequence[L.Callback],
        engine: Engine | None,
        continuity: Continuity,
        seed: int | None,
        server_optimizer: MakeOptimizer | None = None,
        privacy: ClientPrivacy | None = None,
        robust: Robust | None = None,
    ) -> None:
        method = partial(parts.method, **parts.settings)
        options: dict[str, Any] = {"seed": seed, "server_optimizer": server_optimizer, "privacy": privacy}
        options["robust"] = robust
        super().__init__(method, type(module), engine=engine or TrainerEngine(), **options)
        self._parts, self.owner = parts, UserModuleOwner(module)
        if plain_state(module):  # otherwise it makes its layers in setup
            parts.try_out(parts.copied(module))
        self.loop, self.logs = loop, LogsOverClients(type(module).__name__, monitor)
        self._hparams = AttributeDict({"method": parts.method.__name__, **module.hparams})
        check_local(local_callbacks, self.has_inner_trainers)
        self.local, self.handed = LocalHooks(local_callbacks), HandedOptions()
        self._continuity, self._averaged_buffers = continuity, AveragedBuffers()

    # ------------------------------------------------------------------ set-up

    @property
    def reads_classes(self) -> bool:
        """Whether the method reads the classes of batches."""
        return self._parts.method.feature_based

    def configure_callbacks(self) -> list[L.Callback]:
        """Those of the module, which see one epoch a round; and what drives the rounds, where the Trainer has none."""
        if self.trainer.state.fn == TrainerFn.PREDICTING:
            self.predict_by_module()
            return [NamesUnsharedParts(self)]
        self.handed.hand_in(self.trainer, getattr(self.engine, "engine", self.engine))
        own = getattr(getattr(self.trainer, "datamodule", None), "datamodule", None)
        if not brings(self.given_module, "validation_step") or (own is not None and not gives(own, "val_dataloader")):
            self.handed.leave_out_validation(self.trainer)  # a plain run would not validate
        try:
            check_options(self.trainer, call_with_options(self.trainer.callbacks))  # type: ignore[attr-defined]
        except ConfigurationError:
            self.handed.give_back()
            raise
        self.owner.begin_call(self.stage_name == "fit")
        given = self.given_module.configure_callbacks()
        own = self.hand_in(list(given) if isinstance(given, Sequence) else [given])
        return [*own, *missing_callbacks(self.trainer, lambda: self.loop, own)]

    def setup(self, stage: str) -> None:
        """Build the clients; let loggers get the hyper-parameters that they get in a plain run, and the method."""
        super().setup(stage)
        own = hyperparameters_of(self.given_module)
        found = {} if own is None else {"method": self._parts.method.__name__, **own}
        found |= hyperparameters_of(getattr(getattr(self.trainer, "datamodule", None), "datamodule", None)) or {}
        self._hparams_initial, self._log_hyperparams = AttributeDict(python_numbers(found)), bool(found)

    def build_models(self, data: FederatedData) -> list[FederatedClient]:
        """One client's module, which all clients use in turn; ``setup`` of the author's is called here, once."""
        trainer = trainer_or_none(self)
        with torch_seed(derive_seed(self.seed, Purpose.INITIAL_WEIGHTS)):
            self.owner.begin(self.stage_name, trainer, data)
            module = self._parts.copied(self.given_module)
            client = self._parts.make(module, data)
        model = cast(UserModule, client.user_module)
        model.local, model.continuity = self.local, self._continuity
        return [client]

    @property
    def _client_model(self) -> UserModule:
        """The model that all clients use in turn."""
        return cast(UserModule, self.clients.models[0].user_module)

    def _build(self, data: FederatedData) -> None:
        """Refuse ``shared=`` of what the method's server does not average."""
        super()._build(data)
        _, shared = self._client_model.chosen
        sent = {bare_name(name) for name in self._sent()} if shared else set()
        unsent = sorted(shared - sent - self._client_model.frozen_in_module())
        if unsent:
            raise ConfigurationError(
                f"shared= names {unsent[0]}, and the server of {self.method_name} averages no such part of a model: "
                "leave it out, or use a method that averages what it shares, such as FedAvg, FedPer or FedBN"
            )

    def _sent(self) -> State:
        """What the server would send to client 0."""
        return self.server.broadcast(0, self.round).weights

    def on_train_start(self) -> None:
        """Let best values of a new run begin: a Trainer that starts at round 0 has none of an earlier one."""
        trainer: Any = self.trainer
        own = getattr(getattr(self.engine, "engine", self.engine), "callbacks", ())
        self._client_model.check_watched(trainer.callbacks, [*self.local.callbacks, *own])
        client = self.clients.models[0]
        rank_zero_info(what_travels(client))
        if len(self.data.participating) > 1:
            self._averaged_buffers.begin(client, self._sent())
        if self.trainer.current_epoch == 0:
            self.logs.best.clear()

    def on_train_epoch_end(self) -> None:
        """Look at what the round has made of averaged buffers."""
        self._averaged_buffers.look(self.given_module, self._sent())

    def summary_of(self, prefix: str, scores: Scores) -> dict[str, float]:
        """What the modules logged, over clients; see :class:`~pfl_lightning.drop_in.outer.logs_over_clients`."""
        trains = self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking
        return self.logs.summary_of(prefix, scores, trains, names_of(self.data))

    def get_extra_state(self) -> dict[str, Any]:
        """As of every federation, and the best values so far."""
        return {**super().get_extra_state(), "best": dict(self.logs.best)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore it."""
        super().set_extra_state(state)
        self.logs.best = dict(state.get("best", {}))

    @contextmanager
    def personalized(self, personalization: Personalization) -> Iterator[None]:
        """Inside, ``trainer.test`` lets clients train their head or whole model further before it evaluates them.

        Raises:
            ConfigurationError: A linear head on features is asked for.
        """
        method = self._parts.method.__name__
        if personalization.new_head and not self._parts.method.feature_based:
            raise ConfigurationError(
                f"personalize.train {personalization.train!r} puts a new head on features, and {method} has "
                "no features: use 'head', which trains the existing head, 'all', or a method on features (FedPAC)"
            )
        if personalization.train == "head" and self.is_set_up:
            self._parts.find_missing_head(self._client_model, self.data)
        with super().personalized(personalization):
            yield
