"""The module that the outer Trainer fits: the server, the clients' module, and every client's state."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from inspect import isclass
from typing import Any, cast

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from pfl_lightning.checks import check_number, check_seed
from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData
from pfl_lightning.engines import Engine, SequentialEngine
from pfl_lightning.engines.notices import forget_shown
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.federation.evaluation import Evaluation
from pfl_lightning.federation.evaluation_hooks import EvaluationHooks
from pfl_lightning.federation.loop import RoundLoop
from pfl_lightning.federation.outer_callbacks import (
    check_callbacks,
    check_options,
    check_strategy,
    end_by_rounds,
)
from pfl_lightning.federation.saved_state import SavedState
from pfl_lightning.federation.single_items import check_single_items
from pfl_lightning.fit.public import check_public
from pfl_lightning.import_paths import method_named
from pfl_lightning.seeding import Purpose, derive_seed, global_seed, torch_seed
from pfl_lightning.server import Aggregator
from pfl_lightning.state.architectures import (
    ArchitectureSummary,
    EncoderChoice,
    MethodFactory,
    as_assignment,
    build_clients,
)
from pfl_lightning.state.carried import CarriedStates
from pfl_lightning.state.checkpoints.writing import use_atomic_files
from pfl_lightning.state.client_states import spill_to_disk
from pfl_lightning.state.clients import Clients

__all__ = ["Federation"]


class Federation(EvaluationHooks, SavedState):
    """A federation of clients as one LightningModule.

    One epoch of the outer Trainer is one communication round, one training batch is the local fit of one client, and in
    validation and test one batch is one client, evaluated with its own model on its own parts. An engine may run ahead
    of the batches, with several clients at once. The rounds are driven by
    :class:`pfl_lightning.callbacks.FederatedLoop`; the data come from a
    :class:`pfl_lightning.datamodules.FederatedDataModule`.

    Args:
        method: Makes the client from an encoder and the number of classes: a class of :mod:`pfl_lightning.methods`,
            ``functools.partial`` of one with its hyper-parameters, or its name.
        encoder: Name of a registered encoder, or what makes one from the shape of a sample; a module, of which every
            client has a copy that begins with its weights; a list of them, assigned to the clients round-robin; or an
            assignment of :mod:`pfl_lightning.encoders` (by share, by client).
        engine: How local fits run; ``None`` is :class:`~pfl_lightning.engines.SequentialEngine`.
        seed: Seed of everything random; ``None`` takes what ``seed_everything`` set, or 0.
        client_state_memory_gb: What clients have stored rests in memory, unless that of all clients together would
            take more than this many gigabytes (10^9 bytes): then it rests in temporary files, of which the operating
            system keeps in memory what it has room for. ``None`` for never, 0 for always. The results are the same.
        spill_dir: Where such files lie, best on a local disk; ``None`` is the system's folder for temporary files
            (which some systems keep in memory: then name another). They have no names (``ls`` does not show them,
            ``df`` does), grow with the clients that take part, and are gone when the process is, however it ends.
    """

    def __init__(
        self,
        method: MethodFactory,
        encoder: EncoderChoice,
        engine: Engine | None = None,
        seed: int | None = None,
        client_state_memory_gb: float | None = 4.0,
        spill_dir: str | None = None,
    ) -> None:
        super().__init__()
        method = _checked_method(method)
        if engine is not None and not isinstance(engine, Engine):
            raise ConfigurationError(
                f"engine must be an engine, such as VectorizedEngine() or RayEngine(), got {engine!r}"
            )
        if seed is not None:
            check_seed("seed", seed)
        self.automatic_optimization = False
        self.engine = engine or SequentialEngine()
        self.seed = global_seed() if seed is None else seed
        if client_state_memory_gb is not None:
            check_number("client_state_memory_gb", client_state_memory_gb)
        self.client_state_memory_gb, self.spill_dir = client_state_memory_gb, spill_dir
        self.method_factory, self._assignment = method, as_assignment(encoder)
        self.models = nn.ModuleList()
        self.round = 0
        self.has_trained = False  # or was loaded from a checkpoint
        self._current_round = None
        self.evaluation = Evaluation()
        self._personalization = self._stage = None

    # ------------------------------------------------------------------ set-up

    def describe(self, data: FederatedData) -> list[ArchitectureSummary]:
        """What the architectures would be on these data, without a Trainer."""
        models = self.build_models(data)
        return Clients(models, self._assignment.labels, self._assignment.assign(data.num_clients)).summaries

    def setup(self, stage: str) -> None:
        """Build the clients' modules, the server and the clients' states from the data's shape, once."""
        forget_shown()
        check_strategy(self.trainer)
        use_atomic_files(self.trainer)
        if not self.is_set_up:
            self._build(self.data)
        elif self.personal.num_clients != self.data.num_clients:
            raise ConfigurationError(
                f"this federation has {self.personal.num_clients} clients, the data have {self.data.num_clients}"
            )
        elif stage == "fit":
            self._know(self.data)
        if stage == "fit":
            check_single_items(self.clients, self.data)

    def build_models(self, data: FederatedData) -> list[FederatedClient]:
        """The clients' modules, one for each architecture, in their first state."""
        return build_clients(self._assignment, self.method_factory, data, self.seed)

    def _build(self, data: FederatedData) -> None:
        groups = self._assignment.assign(data.num_clients)
        models = self.build_models(data)
        if models[0].views > 1 and not data.augment and models[0].step_module is models[0]:
            warnings.warn(
                f"{type(models[0]).__name__} compares {models[0].views} augmented views of each sample, and the data "
                "module augments nothing (augment=False): the views are equal",
                stacklevel=2,
            )
        check_public(models[0], data)
        # Lightning would convert later, when the server and the personal states have taken their dtype already.
        # (A checkpoint is loaded before that, too.)
        convert = self.trainer.precision_plugin.convert_module
        self.models.extend(convert(model) for model in models)
        self.clients = Clients([cast(FederatedClient, model) for model in self.models], self._assignment.labels, groups)
        with torch_seed(derive_seed(self.seed, Purpose.SERVER)):
            server = self.clients.models[0].configure_aggregator(data.num_clients)
        if not isinstance(server, Aggregator):
            raise ConfigurationError(
                f"{type(self.clients.models[0]).__name__}.configure_aggregator returned {type(server).__name__}, "
                "expected an Aggregator: return the method's server, such as AveragingAggregator(self, num_clients)"
            )
        self.server = cast(Aggregator, convert(server))
        self.server.seed = self.seed
        stores = [*self.personal.stores, *self.server.client_states()]
        spill_to_disk(self.client_state_memory_gb, stores, self.spill_dir)
        if any(model.hands_on for model in self.clients.models):
            limit = self.client_state_memory_gb
            stored = sum(store.most_bytes for store in self.personal.stores) / 1e9
            rest = None if limit is None else limit - stored
            self.clients.carried = CarriedStates(data.num_clients, rest, self.spill_dir)
        self._know(data)

    def configure_callbacks(self) -> list[L.Callback]:
        """Return a FederatedLoop with its default arguments where a fit's Trainer has none; on SLURM, a Preemption.

        Lightning replaces callbacks of the Trainer by those of the same class that a module returns. An evaluation
        gets none: a loop would refuse a checkpoint from the middle of a round, which can be evaluated.
        """
        if self.trainer.state.fn == TrainerFn.FITTING:
            check_options(self.trainer)
        return self.missing_callbacks()

    def missing_callbacks(self, beside: Sequence[L.Callback] = ()) -> list[L.Callback]:
        """Return the loop that a fit lacks, and on SLURM what waits for its signals; nothing for an evaluation.

        Args:
            beside: Callbacks that the Trainer gets beside those that it has.
        """
        from pfl_lightning.callbacks.preemption import Preemption

        callbacks: list[L.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        check_callbacks((*callbacks, *beside))
        if self.trainer.state.fn != TrainerFn.FITTING:
            return []
        end_by_rounds((*callbacks, *beside))
        driven = any(isinstance(callback, RoundLoop) for callback in (*callbacks, *beside))
        missing = [] if driven else [self.default_loop()]
        return [*missing, Preemption()] if Preemption.is_needed(self.trainer) else missing

    def default_loop(self) -> L.Callback:
        """What drives the rounds of a fit whose Trainer has no FederatedLoop."""
        return RoundLoop()

    def configure_optimizers(self) -> list[Any]:
        """No optimizers: every local fit has its own."""
        return []  # of None Lightning would warn


def _checked_method(given: Any) -> MethodFactory:
    """What makes the clients.

    Raises:
        ConfigurationError: It makes none; says what to give.
    """
    method: Any = method_named(given) if isinstance(given, str) else given
    made = method
    while isinstance(made, partial):
        made = made.func
    if isinstance(made, nn.Module):
        name = type(made).__name__
        raise ConfigurationError(
            f"method must be a class of pfl_lightning.methods, a partial of one or its name, got a {name} that is made "
            f"already: the federation makes it of the encoder and the data; give {name}, or partial({name}, lr=0.1)"
        )
    if not callable(made) or (isclass(made) and not issubclass(made, FederatedClient)):
        raise ConfigurationError(
            f"method must be a class of pfl_lightning.methods, a partial of one or its name, got {given!r}"
        )
    return cast(MethodFactory, method)
