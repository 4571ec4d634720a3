"""The module that the outer Trainer fits: the server, the clients' modules, and every client's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar, cast

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torchmetrics import Metric

from pfl_lightning.checks import check_number, check_seed
from pfl_lightning.class_metrics import ClassMetric, asks_confusion
from pfl_lightning.client import FederatedClient
from pfl_lightning.data import FederatedData
from pfl_lightning.encoders.assignment import unwrapped
from pfl_lightning.engines import Engine, FitEnvironment, SequentialEngine
from pfl_lightning.errors import ConfigurationError, FederationError
from pfl_lightning.federation import own_models, predictions, saved_state, set_up
from pfl_lightning.federation.evaluation import Evaluation, Scores, summarize_scores
from pfl_lightning.federation.loop import RoundLoop
from pfl_lightning.federation.outer_callbacks import check_options
from pfl_lightning.federation.outer_trainer import name_round, release_data
from pfl_lightning.federation.personalization import PersonalizationStage
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.fit.tasks import Clock
from pfl_lightning.learner import MakeOptimizer
from pfl_lightning.lightning_private import trainer_or_none
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.phases import Personalization
from pfl_lightning.privacy import ClientPrivacy
from pfl_lightning.privacy.mechanism import PrivacyMechanism
from pfl_lightning.robust import Robust
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
from pfl_lightning.state.clients import Clients, GroupedStates
from pfl_lightning.state.update_norms import UpdateGuard


class Federation(L.LightningModule):
    """A federation of clients as one LightningModule.

    One epoch of the outer Trainer is one communication round, one training batch is the local fit of one client, and in
    validation and test one batch is one client, evaluated with its own model on its own parts. An engine may run ahead
    of the batches, with several clients at once. The rounds are driven by a callback, a
    :class:`~pfl_lightning.callbacks.RoundLoop`: the one that a fit gets by itself, or a
    :class:`~pfl_lightning.callbacks.FederatedLoop` of yours, which is one with ``method=`` beside its options. The
    data come from a :class:`pfl_lightning.datamodules.FederatedDataModule`.

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
        server_optimizer: Makes the optimizer by which the server steps towards the average of what clients share,
            where its method averages: one of :mod:`pfl_lightning.server_optimizers`, or any other, such as
            ``partial(torch.optim.SGD, lr=1.0, momentum=0.9)``. ``None`` takes over the average.
        privacy: Client-level differential privacy of what the server sends; ``None`` for none.
        robust: Rule of :mod:`pfl_lightning.robust` that keeps a few lying clients from leading the server where they
            want: it bounds updates, replaces their average, or leaves some out. ``None`` trusts all.
        metrics: What clients' class scores are judged by in every evaluation, beside accuracy and loss: names of
            :data:`~pfl_lightning.class_metrics.NAMED_METRICS`, or metrics of torchmetrics, their classes or the import
            paths of these. They are logged as ``val_f1/mean`` and so on, over the clients for which they are defined.
    """

    tests_in_fits: ClassVar[bool] = True
    """Whether clients' test parts are evaluated beside their validation parts during a fit."""

    takes_items: ClassVar[bool] = False
    """Whether clients' samples may be items of any kind, and not tensors alone."""

    clients: Clients
    """Modules and stored states of all clients."""

    server: Aggregator
    """Receives the updates and says what clients get."""

    def __init__(
        self,
        method: MethodFactory,
        encoder: EncoderChoice,
        engine: Engine | None = None,
        seed: int | None = None,
        client_state_memory_gb: float | None = 4.0,
        spill_dir: str | None = None,
        server_optimizer: MakeOptimizer | None = None,
        privacy: ClientPrivacy | None = None,
        robust: Robust | None = None,
        metrics: Sequence[str | Metric | type[Metric]] = (),
    ) -> None:
        super().__init__()
        if engine is not None and not isinstance(engine, Engine):
            raise ConfigurationError(f"engine must be an engine, such as VectorizedEngine(), got {engine!r}")
        if seed is not None:
            check_seed("seed", seed)
        check_number("client_state_memory_gb", client_state_memory_gb, optional=True)
        self.method_factory, self._assignment = set_up.checked_method(method), as_assignment(encoder)
        self.automatic_optimization = False
        self.engine = engine or SequentialEngine()
        self.seed = global_seed() if seed is None else seed
        self.client_state_memory_gb, self.spill_dir = client_state_memory_gb, spill_dir
        if privacy is not None and not isinstance(privacy, ClientPrivacy):
            raise ConfigurationError(f"privacy must be a ClientPrivacy(noise_multiplier=...), got {privacy!r}")
        self.mechanism: PrivacyMechanism | None = None  # of the privacy, when there is a server
        if robust is not None and not isinstance(robust, Robust):
            raise ConfigurationError(f"robust must be a rule, such as MultiKrum(byzantine=1), got {robust!r}")
        if robust is not None and privacy is not None:
            raise ConfigurationError(
                "use either robust or privacy: the updates that a rule selects depend on all of them, which the "
                "accounted noise does not hide; privacy bounds each update by itself"
            )
        self.server_optimizer, self.privacy, self.robust = server_optimizer, privacy, robust
        self.confusion = asks_confusion(metrics)
        self.metrics, self.class_metrics = metrics, dict[str, ClassMetric]()  # the latter when classes are known
        self.models = nn.ModuleList()  # one for each architecture, which its clients use in turn
        self.round = 0  # the last one that was trained; the fine-tuning before an evaluation draws by it
        self.has_trained = False  # or was loaded from a checkpoint
        self.data_before: str | None = None  # of the loaded checkpoint, where it was trained on other data
        self.fingerprints: dict[str, str | None] = {}  # of the partition and the data
        self.client_names: tuple[str, ...] = ()  # empty where clients have numbers alone
        self.lying: frozenset[int] = frozenset()  # for an experiment (Attack)
        self.evaluation = Evaluation()  # the one under way, or the last
        self._current_round: Round | None = None
        self._personalization: Personalization | None = None
        self._stage: PersonalizationStage | None = None

    def __repr__(self) -> str:
        """What it is made of, not the layers of every network."""
        method, options = unwrapped(self.method_factory)
        shown = [getattr(method, "__name__", type(method).__name__)]
        shown += [*(f"{name}={value!r}" for name, value in options.items()), type(self.engine).__name__]
        shown += [f"seed={self.seed}", f"{self.num_clients} clients" if self.is_set_up else "not set up"]
        return f"{type(self).__name__}({', '.join(shown)})"

    # ------------------------------------------------------------------ set-up

    def describe(self, data: FederatedData) -> list[ArchitectureSummary]:
        """What the architectures would be on these data, without a Trainer."""
        models = self.build_models(data)
        return Clients(models, self._assignment.labels, self._assignment.assign(data.num_clients)).summaries

    setup = set_up.begin
    _build = set_up.build

    def build_models(self, data: FederatedData) -> list[FederatedClient]:
        """The clients' modules, one for each architecture, in their initial state."""
        data.read_whole()
        return build_clients(self._assignment, self.method_factory, data, self.seed)

    def configure_callbacks(self) -> list[L.Callback]:
        """Return a RoundLoop with its default arguments where a fit's Trainer has none; on SLURM, a Preemption.

        Lightning replaces callbacks of the Trainer by those of the same class that a module returns. An evaluation
        gets none: a loop would refuse a checkpoint from the middle of a round, which can be evaluated.
        """
        if self.trainer.state.fn == TrainerFn.FITTING:
            check_options(self.trainer)
        return set_up.missing_callbacks(self.trainer, RoundLoop)

    def configure_optimizers(self) -> list[Any]:
        """No optimizers: every phase of a local fit has its own."""
        return []  # of None Lightning would warn

    # ------------------------------------------------------------------ what it holds

    @property
    def data(self) -> FederatedData:
        """The data module of the Trainer that this federation is attached to."""
        with suppress(RuntimeError):  # it belongs to no Trainer
            datamodule = getattr(self.trainer, "datamodule", None)
            if hasattr(datamodule, "client_data"):
                return cast(FederatedData, datamodule)
        raise set_up.no_data(self)

    @property
    def method_name(self) -> str:
        """Name of the method, such as ``FedPAC``."""
        return type(self.models[0]).__name__

    @property
    def is_set_up(self) -> bool:
        """Whether there are clients: they are made when the Trainer's fit, validate or test begins."""
        return len(self.models) > 0

    @property
    def num_clients(self) -> int:
        """Number of clients, m."""
        return self.personal.num_clients

    @property
    def personal(self) -> GroupedStates:
        """Personal states that the clients have stored."""
        return self.clients.personal

    @property
    def rounds_trained(self) -> list[int]:
        """For each client, the rounds in which the server has taken an update of it."""
        counted: list[int] = self.clients.rounds_trained.tolist()
        return counted

    @property
    def never_trained(self) -> list[int]:
        """Clients that could take part in rounds and trained in none; empty before any training."""
        rounds = self.rounds_trained
        return [client for client in self.data.participating if not rounds[client]] if any(rounds) else []

    @property
    def architectures(self) -> list[ArchitectureSummary]:
        """What the architectures are and how many clients have each."""
        return self.clients.summaries

    @property
    def environment(self) -> FitEnvironment:
        """Settings of the outer Trainer and of the run that every local fit gets."""
        participating, clip = len(self.data.participating), self.engine.gradient_clip_val
        trainer, precision = self.trainer, str(self.trainer.precision)
        rounds = (trainer.max_epochs or 0) if trainer.state.fn == TrainerFn.FITTING else 0
        facts = RunFacts(participating, rounds if rounds > 0 else None, frozenset(), clip, precision, self.client_names)
        clock = Clock(trainer.current_epoch, trainer.global_step, trainer.max_epochs)
        settings = self.seed, self.device, trainer.precision_plugin, precision, facts, clock
        return FitEnvironment(*settings, self.class_metrics, self.confusion)

    # ------------------------------------------------------------------ the engine

    def on_fit_start(self) -> None:
        """Check before the first round that clients have what the method needs; start the engine."""
        set_up.check_clients(self.clients, self.data, self.environment.facts)
        self._start_engine()

    def on_validation_start(self) -> None:
        """Start the engine, unless a fit has done so."""
        if self.trainer.state.fn != TrainerFn.FITTING:
            self._start_engine()

    on_test_start = on_validation_start

    @torch.inference_mode(False)  # whose tensors could not train
    def _start_engine(self) -> None:
        environment = self.environment
        self._stage = self.new_stage()
        self.server.facts = replace(environment.facts, novel=frozenset(self.data.novel))
        models = self.clients.models if self._stage is None else self._stage.modules
        self.engine.start(models, self.data, environment)

    def new_stage(self) -> PersonalizationStage | None:
        """The stage that adapts clients' models before they are evaluated; ``None`` outside of :meth:`personalized`."""
        return None if self._personalization is None else PersonalizationStage(self._personalization, self)

    @contextmanager
    def personalized(self, personalization: Personalization) -> Iterator[None]:
        """Context in which ``trainer.test`` lets every client adapt its model to its own data before it is evaluated.

        What the clients adapt is evaluated and then forgotten; the federation stays as it is.
        """
        self._personalization = personalization
        try:
            yield
        finally:
            self._personalization = None
            if self._stage is not None:  # the engine failed before there was anything to tear down
                self.stop_engine()

    @property
    def is_personalizing(self) -> bool:
        """Whether a test evaluates adapted models: inside of :meth:`personalized`."""
        return self._personalization is not None

    def teardown(self, stage: str) -> None:
        """Stop the engine."""
        self.stop_engine()

    def stop_engine(self) -> None:
        """Drop the local fits and evaluations under way and release the engine's resources and the data's processes."""
        if self._current_round is not None:
            self._current_round.drop()
            self._current_round = None
        self.evaluation.stop()
        self.engine.stop()
        release_data(trainer_or_none(self))
        if self._stage is not None:
            self._stage.close()
            self._stage = None

    # ------------------------------------------------------------------ rounds

    def begin_round(self, traffic: Traffic, guard: UpdateGuard, on_client_error: str = "skip") -> Round:
        """Begin the Trainer's current round: hand its cohort to the engine; see :class:`~pfl_lightning.round.Round`."""
        trainer, data = self.trainer, self.data
        cohort = data.current_cohort()[: int(trainer.num_training_batches)]
        given = self.clients, self.server, data, self.environment, traffic, guard, on_client_error, self.robust
        begun = Round(trainer.current_epoch, cohort, *given)
        if self.mechanism is not None:
            begun.mechanism = self.mechanism
            self.mechanism.begin()
        begun.fits = self.engine.run(begun.broadcasts(), begun.environment)
        self._current_round = begun
        return begun

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """Fit the clients of the batch and pass their updates on to the server."""
        if self._current_round is None:
            raise FederationError("no round has begun: no RoundLoop (FederatedLoop) is among the Trainer's callbacks")
        if batch_idx == 0 and self.trainer.progress_bar_callback is not None:
            name_round(self.trainer)
        for client in batch.tolist():
            result = self._current_round.fit_next(client)
            self.round, self.has_trained = result.round, True
            if "loss" in result.losses:
                progress = {"round": result.round + 1.0, "client": float(client), "loss": result.losses["loss"]}
                # Where progress bars and callbacks find them; `log` would take milliseconds to bring them there.
                self.trainer.progress_bar_metrics.update(progress)
                self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in progress.items()})

    # ------------------------------------------------------------------ evaluations: one batch is one client

    def on_validation_epoch_start(self) -> None:
        """Hand the clients to the engine; during a fit their test parts may be evaluated, too."""
        sanity = self.trainer.sanity_checking
        limits = self.trainer.num_sanity_val_batches if sanity else self.trainer.num_val_batches
        test = self.tests_in_fits and self.trainer.state.fn == TrainerFn.FITTING
        self.evaluation = Evaluation.begin(self, limits, validation=True, test=test)

    def on_test_epoch_start(self) -> None:
        """Hand the clients to the engine."""
        self.evaluation = Evaluation.begin(self, self.trainer.num_test_batches, validation=False, test=True)

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
        if not self.evaluation.left:  # here, so that callbacks find the values in their on_validation_epoch_end
            self.on_validation_epoch_end()

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Log ``val_accuracy/*`` of the validation parts and ``test_accuracy/*`` of the test parts."""
        if not self.evaluation.is_closed:
            self.evaluation.close(self)

    on_test_epoch_end = on_validation_epoch_end

    def summary_of(self, prefix: str, scores: Scores) -> dict[str, float]:
        """Return metrics over clients by name; see :func:`~pfl_lightning.federation.evaluation.summarize_scores`."""
        has_loss = self.clients.models[0].evaluation != "knn"
        return summarize_scores(prefix, scores, self.class_metrics, has_loss=has_loss, names=self.client_names)

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

    evaluation_task = own_models.evaluation_task
    client_model = own_models.client_model
    client_models = own_models.client_models
    predict = predictions.predict

    # ------------------------------------------------------------------ checkpoints

    get_extra_state = saved_state.saved_content
    set_extra_state = saved_state.restore
    on_load_checkpoint = saved_state.check_checkpoint

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state; an error says in one sentence what does not fit."""
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except FederationError:
            raise
        except (RuntimeError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise saved_state.misfit(error) from error
