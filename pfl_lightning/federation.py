"""The module that the outer Trainer fits: the server, the clients' module, and every client's state."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from pfl_lightning.checks import check_number
from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData
from pfl_lightning.engines import Engine, EvaluationTask, FitEnvironment, SequentialEngine
from pfl_lightning.engines.evaluation import load_own_state
from pfl_lightning.engines.lifecycle import make_context
from pfl_lightning.errors import CheckpointError, ConfigurationError, FederationError
from pfl_lightning.evaluation import Evaluation, Scores, summarize_scores, warn_if_not_finetuned
from pfl_lightning.facts import RunFacts
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.personalization import PersonalizationStage
from pfl_lightning.phases import Personalization, Phase
from pfl_lightning.round import Round, Traffic
from pfl_lightning.seeding import global_seed
from pfl_lightning.server import Aggregator
from pfl_lightning.state.architectures import (
    ArchitectureSummary,
    EncoderChoice,
    MethodFactory,
    as_assignment,
    build_clients,
)
from pfl_lightning.state.checkpoints import check_fits
from pfl_lightning.state.client_states import spill_to_disk
from pfl_lightning.state.clients import Clients, GroupedStates

__all__ = ["Federation"]


class Federation(L.LightningModule):
    """A federation of clients as one LightningModule.

    One epoch of the outer Trainer is one communication round, one training batch is the local fit of one client, and in
    validation and test one batch is one client, evaluated with its own model on its own parts. An engine may run ahead
    of the batches, with several clients at once. The rounds are driven by
    :class:`pfl_lightning.callbacks.FederatedLoop`; the data come from a
    :class:`pfl_lightning.datamodules.FederatedDataModule`.

    Args:
        method: Makes the client from an encoder and the number of classes: a class of :mod:`pfl_lightning.methods`, or
            ``functools.partial`` of one with its hyper-parameters.
        encoder: Name of a registered encoder, or what makes one from the shape of a sample; a list of them, assigned to
            the clients round-robin; or an assignment of :mod:`pfl_lightning.encoders` (by share, by client).
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
        if not callable(method):
            raise ConfigurationError(
                f"method must be a class of pfl_lightning.methods or a partial of one, got {method!r}"
            )
        self.automatic_optimization = False
        self.engine = engine or SequentialEngine()
        self.seed = global_seed() if seed is None else seed
        if client_state_memory_gb is not None:
            check_number("client_state_memory_gb", client_state_memory_gb)
        self.client_state_memory_gb, self.spill_dir = client_state_memory_gb, spill_dir
        self._make_client, self._assignment = method, as_assignment(encoder)
        self.models = nn.ModuleList()  # one for each architecture, which its clients use in turn
        self.clients: Clients
        self.server: Aggregator
        self.round = 0  # the last that was trained; the fine-tuning before an evaluation draws by it
        self._current_round: Round | None = None
        self.evaluation = Evaluation()
        self._personalization: Personalization | None = None
        self._stage: PersonalizationStage | None = None

    # ------------------------------------------------------------------ set-up

    @property
    def data(self) -> FederatedData:
        """The data module of the Trainer that this federation is attached to."""
        datamodule = getattr(self.trainer, "datamodule", None)
        if datamodule is None or not hasattr(datamodule, "client_data"):
            raise ConfigurationError(
                "a Federation needs a FederatedDataModule: trainer.fit(federation, datamodule=...); "
                f"got {type(datamodule).__name__}. pfl_lightning.datamodules.FromLightning and FromDatasets wrap "
                "others, and pfl_lightning.federate gives one"
            )
        return cast(FederatedData, datamodule)

    @property
    def method_name(self) -> str:
        """Name of the method, such as ``FedPAC``."""
        return type(self.models[0]).__name__

    @property
    def is_set_up(self) -> bool:
        """Whether there are clients: the Trainer's fit, validate or test has shown the data."""
        return len(self.models) > 0

    @property
    def num_clients(self) -> int:
        """Number of clients, m."""
        return self.personal.num_clients

    @property
    def personal(self) -> GroupedStates:
        """What every client has stored."""
        return self.clients.personal

    @property
    def architectures(self) -> list[ArchitectureSummary]:
        """What the architectures are and how many clients have each."""
        return self.clients.summaries

    def describe(self, data: FederatedData) -> list[ArchitectureSummary]:
        """What the architectures would be on these data, without a Trainer."""
        models = self.build_models(data)
        return Clients(models, self._assignment.labels, self._assignment.assign(data.num_clients)).summaries

    def setup(self, stage: str) -> None:
        """Build the clients' modules, the server and the clients' states from the data's shape, once."""
        if self.trainer.world_size > 1:
            raise ConfigurationError(
                f"a federation runs in one process; the Trainer has {self.trainer.world_size}. Use devices=1"
            )
        if not self.is_set_up:
            self._build(self.data)
        elif self.personal.num_clients != self.data.num_clients:
            raise ConfigurationError(
                f"this federation has {self.personal.num_clients} clients, the data have {self.data.num_clients}"
            )

    def build_models(self, data: FederatedData) -> list[FederatedClient]:
        """The clients' modules, one for each architecture, in their first state."""
        return build_clients(self._assignment, self._make_client, data, self.seed)

    def _build(self, data: FederatedData) -> None:
        groups = self._assignment.assign(data.num_clients)
        models = self.build_models(data)
        if models[0].views > 1 and not data.augment:
            warnings.warn(
                f"{type(models[0]).__name__} compares {models[0].views} augmented views of each sample, and the data "
                "module augments nothing (augment=False): the views are equal",
                stacklevel=2,
            )
        # Lightning would convert later, when the server and the personal states have taken their dtype already.
        # (A checkpoint is loaded before that, too.)
        convert = self.trainer.precision_plugin.convert_module
        self.models.extend(convert(model) for model in models)
        self.clients = Clients([cast(FederatedClient, model) for model in self.models], self._assignment.labels, groups)
        self.server = cast(Aggregator, convert(self.clients.models[0].configure_aggregator(data.num_clients)))
        self.server.seed = self.seed
        stores = [*self.personal.stores, *self.server.client_states()]
        spill_to_disk(self.client_state_memory_gb, stores, self.spill_dir)
        self._fingerprint = data.fingerprint

    def configure_callbacks(self) -> list[L.Callback]:
        """Return a FederatedLoop with its default arguments where a fit's Trainer has none.

        Lightning replaces callbacks of the Trainer by those of the same class that a module returns. An evaluation
        gets none: a loop would refuse a checkpoint from the middle of a round, which can be evaluated.
        """
        if self.trainer.state.fn != TrainerFn.FITTING:
            return []
        from pfl_lightning.callbacks.loop import FederatedLoop

        callbacks: list[L.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        has_loop = any(isinstance(callback, FederatedLoop) for callback in callbacks)
        return [] if has_loop else [FederatedLoop()]

    def configure_optimizers(self) -> None:
        """Nothing is optimized here: every local fit has its own optimizer."""
        return None

    # ------------------------------------------------------------------ the engine

    def on_fit_start(self) -> None:
        """See whether clients have the samples that the method needs, not when their turn comes; start the engine."""
        for model in self.clients.models:
            model.check_phases()
        if any(type(model).check_samples is not FederatedClient.check_samples for model in self.clients.models):
            groups: dict[int, dict[int, int]] = {}
            for client in self.data.participating:
                group = groups.setdefault(self.clients.architecture_of[client], {})
                group[client] = len(self.data.client_data(client).train)
            for index, samples in groups.items():
                self.clients.models[index].check_samples(samples)
        self._start_engine()

    def on_validation_start(self) -> None:
        """Let the engine get ready, unless a fit has done so."""
        if self.trainer.state.fn != TrainerFn.FITTING:
            self._start_engine()

    def on_test_start(self) -> None:
        """Let the engine get ready."""
        self._start_engine()

    @torch.inference_mode(False)  # whose tensors could not train
    def _start_engine(self) -> None:
        models = self.clients.models
        if self._personalization is not None:
            convert = self.trainer.precision_plugin.convert_module
            self._stage = PersonalizationStage(self._personalization, self.clients, self.seed, convert)
            models = self._stage.modules
        environment = self.environment
        self.server.facts = environment.facts
        self.engine.start(models, self.data, environment)

    @contextmanager
    def personalized(self, personalization: Personalization) -> Iterator[None]:
        """Inside, ``trainer.test`` lets every client adapt its model to its own data before it is evaluated.

        What the clients adapt is evaluated and then forgotten; the federation stays as it is.

        Args:
            personalization: What is adapted, and how.
        """
        self._personalization = personalization
        try:
            yield
        finally:
            self._personalization = None
            if self._stage is not None:  # the engine failed before there was anything to tear down
                self.stop_engine()

    def teardown(self, stage: str) -> None:
        """Let the engine go."""
        self.stop_engine()

    def stop_engine(self) -> None:
        """Drop the local fits and evaluations under way and release the engine's resources."""
        if self._current_round is not None:
            # The loop keeps the round: its suspended engine would keep clients on the device until the next one.
            fits, self._current_round.fits = self._current_round.fits, iter(())
            if isinstance(fits, Generator):
                fits.close()
            self._current_round = None
        self.evaluation.stop()
        self.engine.stop()
        if self._stage is not None:
            self._stage.close()
            self._stage = None

    @property
    def environment(self) -> FitEnvironment:
        """Settings of the outer Trainer and of the run that every local fit gets."""
        trainer = self.trainer
        rounds = (trainer.max_epochs or 0) if trainer.state.fn == TrainerFn.FITTING else 0
        facts = RunFacts(len(self.data.participating), rounds if rounds > 0 else None)
        return FitEnvironment(self.seed, self.device, trainer.precision_plugin, str(trainer.precision), facts)

    # ------------------------------------------------------------------ a round

    def begin_round(self, traffic: Traffic) -> Round:
        """Begin the Trainer's current round: hand its cohort to the engine.

        Args:
            traffic: Counts the messages of the round.
        """
        trainer, data = self.trainer, self.data
        cohort = data.current_cohort()[: int(trainer.num_training_batches)]
        begun = Round(trainer.current_epoch, cohort, self.clients, self.server, data, self.environment, traffic)
        begun.fits = self.engine.run(begun.broadcasts(), begun.environment)
        self._current_round = begun
        return begun

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """Fit the clients of the batch and pass their updates on to the server."""
        if self._current_round is None:
            raise FederationError("no round has begun: a FederatedLoop must be among the Trainer's callbacks")
        for client in batch.tolist():
            result = self._current_round.fit_next(client)
            self.round = result.round
            if "loss" in result.losses:
                progress = {"round": float(result.round), "client": float(client), "loss": result.losses["loss"]}
                self.log_dict(progress, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1)

    # ------------------------------------------------------------------ evaluation

    def on_validation_epoch_start(self) -> None:
        """Hand the clients to the engine; during a fit their test parts are evaluated, too."""
        sanity = self.trainer.sanity_checking
        limits = self.trainer.num_sanity_val_batches if sanity else self.trainer.num_val_batches
        self._begin_evaluation(limits, validation=True, test=self.trainer.state.fn == TrainerFn.FITTING)

    def on_test_epoch_start(self) -> None:
        """Hand the clients to the engine."""
        self._begin_evaluation(self.trainer.num_test_batches, validation=False, test=True)

    def _begin_evaluation(self, limits: Sequence[int | float], *, validation: bool, test: bool) -> None:
        clients, stage = self.data.evaluated_clients()[: int(limits[0])], self._stage
        tasks = ((client, self.evaluation_task(client, validation=validation, test=test)) for client in clients)
        prepared = (
            (self.clients.model_of(client), task) if stage is None else stage.prepare(client, task)
            for client, task in tasks
        )
        self.evaluation = Evaluation(self.round)
        self.evaluation.start(prepared, self.engine, self.environment)

    # Evaluation under inference_mode would forbid the fine-tuning of a client's model, and would leave tensors behind
    # that no later fit could use.
    @torch.inference_mode(False)
    @torch.no_grad()
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Evaluate each client of the batch with its own model on its own parts."""
        try:
            for client in batch.tolist():
                self.evaluation.evaluate_next(client)
        except BaseException:
            self.stop_engine()  # Lightning calls no teardown after an error, and there may be no loop
            raise

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Log ``accuracy/*`` of the validation parts and ``test_accuracy/*`` of the test parts."""
        self.evaluation.close(self.data.novel, self.summary_of)
        summary = self.evaluation.summary
        # During a fit the loop logs them against the round; Lightning would count local fits.
        outside = self.trainer.state.fn != TrainerFn.FITTING
        self.log_dict(summary, logger=outside, batch_size=1)
        for prefix in () if outside else ("", "novel_", "test_", "novel_test_"):
            mean = summary.get(f"{prefix}accuracy/mean")
            if mean is not None and f"{prefix}accuracy" not in summary:  # which a user's module may log itself
                self.log(f"{prefix}accuracy", mean, logger=False, prog_bar=True, batch_size=1)

    on_test_epoch_end = on_validation_epoch_end

    def summary_of(self, prefix: str, scores: Scores) -> dict[str, float]:
        """Return metrics over clients by name; see :func:`~pfl_lightning.evaluation.summarize_scores`."""
        return summarize_scores(prefix, scores, has_loss=self.clients.models[0].evaluation != "knn")

    @property
    def validation_scores(self) -> dict[int, EvalMetrics]:
        """Metrics of each client on its validation part in the last evaluation."""
        return self.evaluation.validation_scores

    @property
    def test_scores(self) -> dict[int, EvalMetrics]:
        """Metrics of each client on its test part in the last evaluation."""
        return self.evaluation.test_scores

    @property
    def finetune_failures(self) -> list[int]:
        """Clients that the last evaluation took without the fine-tuning of their method, which failed."""
        return self.evaluation.finetune_failures

    # ------------------------------------------------------------------ every client's own model

    def evaluation_task(self, client: int, *, validation: bool = False, test: bool = False) -> EvaluationTask:
        """Return the client's own model after the last round, and the parts to evaluate it on."""
        parts, model = self.data.client_data(client), self.clients.model_of(client)
        return EvaluationTask(
            make_context(self.data, client, self.round, model, self.environment, training=False),
            self.server.broadcast(client, self.round),
            self.clients.stored(client),
            self.clients.keeps_trained(client),
            parts.validation if validation else None,
            parts.test if test else None,
        )

    def client_model(self, client: int) -> L.LightningModule:
        """Return a copy of a client's own model, fine-tuned if the method does so before an evaluation.

        It is a :class:`~pfl_lightning.client.FederatedClient`; in a federation of a user's LightningModule, it is of
        that module's class.

        Raises:
            FederationError: The federation has not been fitted or evaluated yet.
            IndexError: There is no such client.
        """
        if not self.is_set_up:
            raise FederationError("there are no clients before trainer.fit, validate or test has set the federation up")
        if not 0 <= client < self.num_clients:
            raise IndexError(f"there is no client {client}; clients are 0 to {self.num_clients - 1}")
        model, task = self.clients.model_of(client), self.evaluation_task(client)
        with torch.inference_mode(False), torch.no_grad():
            warn_if_not_finetuned(self.engine.load_own_model(model, task, self.environment))
        own = copy.deepcopy(model)
        own.phase = Phase(losses=own.exported_losses)
        return own.exported_module()

    def client_models(self, clients: Iterable[int]) -> Iterator[tuple[int, FederatedClient]]:
        """Yield the model that each client is evaluated with, before any fine-tuning, for inspection.

        The models stand, one after the other, in copies of the architectures' modules, so that the training goes on
        undisturbed.

        Yields:
            The client's number and its model in evaluation mode, which is valid until the next is asked for.
        """
        copies: dict[int, FederatedClient] = {}
        for client in clients:
            own = self.clients.model_of(client)
            if id(own) not in copies:
                copies[id(own)] = copy.deepcopy(own)
            model = copies[id(own)]
            load_own_state(model, self.evaluation_task(client))
            yield client, model.eval()

    # ------------------------------------------------------------------ checkpoints

    def get_extra_state(self) -> dict[str, Any]:
        """What identifies the federation, every client's personal state, and what never changes."""
        return {
            "method": self.method_name,
            "seed": self.seed,
            "partition": self._fingerprint,
            "round": self.round,
            **self.clients.state_dict(),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore every client's personal state, and what never changes."""
        if state["seed"] != self.seed and self.trainer.state.fn == TrainerFn.FITTING:
            warnings.warn(
                f"the checkpoint was made with seed {state['seed']}, this run has {self.seed}: "
                "what follows will differ from the uninterrupted run",
                stacklevel=2,
            )
        self.clients.load_state_dict(state)
        self.round = state["round"]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of something else before anything is overwritten.

        Raises:
            CheckpointError: The checkpoint is of another method, another encoder or another number of clients.
        """
        if not self.is_set_up:
            raise CheckpointError(
                "a federation takes its shape from the data: load the checkpoint by ckpt_path of the Trainer's fit, "
                "validate or test, not by load_from_checkpoint"
            )
        own = {f"models.{name}": tensor for name, tensor in self.models.state_dict().items()}
        check_fits(
            checkpoint["state_dict"],
            self.method_name,
            self.num_clients,
            self.data.fingerprint,
            self.clients.labels,
            own,
        )
