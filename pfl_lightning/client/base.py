"""The base of every method's client."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from pfl_lightning.checks import check_at_least, check_choice, check_learning_rate, check_number
from pfl_lightning.client.model import ModelAccess
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.context import Batch, Citation, FitContext, RunFacts
from pfl_lightning.messages import ClientUpdate
from pfl_lightning.names import show_parameters
from pfl_lightning.options import BatchNorm, Schedule
from pfl_lightning.phases import Personalization, Phase
from pfl_lightning.server import Aggregator, AveragingAggregator
from pfl_lightning.state.tensors import load_state, select_state


class FederatedClient(ModelAccess):
    """An encoder with a head, or a user's module, and a method's loss: what one client trains on its own data.

    A method is a subclass that says what is shared, in which phases a local fit goes, what is added to the loss, what
    is uploaded, and which :class:`~pfl_lightning.server.Aggregator` receives it. ``training_step`` must be a pure
    function of parameters, buffers and batch: it changes no Python state and calls no ``.item()``.

    One module serves all clients of an architecture: before a fit it receives the client's personal state and the
    server's broadcast.

    Args:
        encoder: Network from inputs to features (N, d), with an attribute ``out_features`` (d).
        num_classes: Number of classes, C.
        lr: Learning rate of the local SGD.
        momentum: Momentum of the local SGD.
        weight_decay: Weight decay of the local SGD.
        epochs: Local epochs a round, E.
        optimizer: Makes the optimizer from the trainable parameters, in place of SGD.
        lr_scheduler: Makes a scheduler from the optimizer, stepped after every local epoch of a phase.
        schedule: What the scheduler counts before a local fit: ``"rounds"``, the local epochs of all earlier rounds, as
            if the client had taken part in each; ``"continue"``, those of the rounds that it took part in;
            ``"restart"``, none. A fine-tuning before an evaluation starts at the beginning.
        fine_tune: Part that a client trains on its own data, from its model, before it is evaluated: ``None``,
            ``"head"`` or ``"all"``. The result is used for the evaluation and then forgotten.
        fine_tune_epochs: Epochs of that fine-tuning.
        fine_tune_lr: Its learning rate; ``None`` takes ``lr``.
        eval_model: ``"aggregated"`` or ``"trained"``, see the attribute; ``None`` takes the method's own.
        batch_norm: Batch normalization of what is shared: ``"shared"``, ``"own_statistics"`` (each client keeps its
            running statistics, weights are shared) or ``"own"``, see the attribute; ``None`` takes the method's own.
            Under ``"own_statistics"`` novel clients are evaluated on initial statistics: mean 0, variance 1.
    """

    citation: ClassVar[Citation | None] = None
    """Where the method was published."""

    model_agnostic: ClassVar[bool] = False
    """Whether the method needs no more of a model than its training step and its parameters, so that it applies to any
    LightningModule (:func:`pfl_lightning.federate`). Otherwise it needs an encoder and a head."""

    aggregator_class: ClassVar[Callable[..., Aggregator]] = AveragingAggregator
    """The method's server, set by ``class MyAggregator(Aggregator, of=MyMethod)``; by default the mean of what is
    shared."""

    by_samples: bool = True
    """Whether the mean of the shared state is weighted by samples, not the same for every client."""

    equal_features: bool = False
    """Whether all clients need features of one width although they share no weights (prototypes, class means)."""

    uses_unlabeled_data: bool = False
    """Whether a local fit also trains on the client's samples without labels, if the data have some; their label in a
    batch is -1. Phases of plain batches, personalization and evaluation see the labeled ones alone."""

    progress_bar_names: frozenset[str] = frozenset()
    """Names of the values, logged by a user's module in the current fit, that the progress bar shows."""

    logged_reductions: Mapping[str, str] = {}  # replaced, never changed
    """``"sum"``, ``"min"`` or ``"max"`` by the names of logged values of the current fit that are no means."""

    loss_scale: bytes = b""
    """Scale of the loss under float16, as the last phase has left it; empty for a first one."""

    uninitialized_buffers: frozenset[str] = frozenset()
    """Names of buffers that are yet to be set, and hold no finite numbers until then: they stay on the client."""

    public_samples: int = 0
    """Public samples that a round uses (:class:`~pfl_lightning.fit.public.PublicSamples`), the same for all clients; 0
    for a method that needs none."""

    needs_public: ClassVar[bool] = False
    """Whether clients learn from public samples, as the method usually does, so that the data module must have some."""

    needs_validation: bool = False
    """Whether a local fit uses the client's validation part, so that clients without one are refused at the start."""

    averages_samples: ClassVar[bool] = True
    """Whether the loss of a step is the mean over its batch of losses of one sample each, beside what does not depend
    on the batch. Of a class that overrides ``training_step`` or ``loss_terms`` it holds if that class says so itself:
    ``VectorizedEngine`` then pads incomplete batches, and masks what was added."""

    views: int = 1
    """Augmented copies of every sample in a training batch; with more than one, inputs have shape (B, views, ...)."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Show all options in the signature, and the paper in the docstring of the class that names it."""
        super().__init_subclass__(**options)
        show_parameters(cls)
        paper: Citation | None = vars(cls).get("citation")
        if paper is not None and cls.__doc__:
            source = f"{paper.authors} {paper.title}. {paper.venue} {paper.year}."
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__)}\n\nPaper: {source}\n"

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        lr: float = 0.01,
        momentum: float = 0.5,
        weight_decay: float = 5e-4,
        epochs: int = 5,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        lr_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
        schedule: Schedule = "rounds",
        fine_tune: str | None = None,
        fine_tune_epochs: int = 1,
        fine_tune_lr: float | None = None,
        eval_model: str | None = None,
        batch_norm: BatchNorm | None = None,
    ) -> None:
        super().__init__()
        check_choice("fine_tune", fine_tune, (None, "head", "all"))
        check_choice(f"eval_model of {type(self).__name__}", eval_model, (None, *self.eval_models))
        check_choice("batch_norm", batch_norm, (None, *get_args(BatchNorm)))
        check_choice("schedule", schedule, get_args(Schedule))
        self.eval_model = eval_model or type(self).eval_model
        self.batch_norm = batch_norm or type(self).batch_norm
        check_choice(f"batch_norm of {type(self).__name__}", self.batch_norm, get_args(BatchNorm))
        check_at_least("epochs", epochs, 1)
        check_at_least("fine_tune_epochs", fine_tune_epochs, 1)
        check_learning_rate("lr", lr)
        check_number("momentum", momentum)
        if momentum > 1:
            raise ValueError(f"momentum must be at most 1, as steps would grow without end, got {momentum:g}")
        check_number("weight_decay", weight_decay)
        check_learning_rate("fine_tune_lr", fine_tune_lr, optional=True)
        check_at_least("num_classes", num_classes, 0)  # 0 for a module without classes
        self.num_classes = num_classes
        self.phase = Phase()
        if self.user_module is not None:  # which configures its own optimizers
            optimizer, lr_scheduler, schedule = None, None, "restart"  # its own go on by `continuity`
        self.assemble(encoder)
        self.frozen = self.find_frozen(encoder)
        self.lr, self.momentum, self.weight_decay, self.epochs = lr, momentum, weight_decay, epochs
        self.fine_tune, self.fine_tune_epochs, self.fine_tune_lr = fine_tune, fine_tune_epochs, fine_tune_lr
        self._make_optimizer, self._make_scheduler, self.schedule = optimizer, lr_scheduler, schedule
        self.personalization: Personalization | None = None  # in the place of fine_tune, set from outside
        self._recorder: dict[str, list[Tensor]] | None = None
        self.isolation: Any = None
        """What engines note of the module, to see that no client begins with what is another's; not copied."""
        self.logged_metrics: dict[str, float] = {}
        """Values that a user's module logged in the current fit, apart from the terms of the loss."""

    def assemble(self, encoder: nn.Module) -> None:
        """Put the model together: the encoder, and a linear head on its features; or a user's module."""
        if self.user_module is not None:
            self.user_module.mount()
            return
        self.encoder = encoder
        self.head = nn.Linear(encoder.out_features, self.num_classes)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ what a method says of itself

    def configure_aggregator(self, num_clients: int) -> Aggregator:
        """The server's side of the method; by default :attr:`aggregator_class`."""
        return self.aggregator_class(self, num_clients)

    def phases(self) -> tuple[Phase, ...]:
        """The phases of a local fit, in order."""
        return (Phase(epochs=self.epochs),)

    def personalization_phases(self) -> tuple[Phase, ...]:
        """The phases in which a client adapts the model that it is evaluated with; none by default."""
        if self.personalization is not None:
            return (self.personalization.phase(self.heads, self.personalization_losses),)
        if self.fine_tune is None:
            return ()
        train = self.heads if self.fine_tune == "head" else ("*",)
        losses = self.personalization_losses
        return (Phase("fine_tune", train, self.fine_tune_epochs, self.fine_tune_lr, losses=losses),)

    def receive(self, broadcast: Any) -> None:
        """Take over what the server sends, a :class:`~pfl_lightning.messages.Broadcast` of the method's own class."""
        if self.user_module is not None:
            self.user_module.receive(broadcast)
        load_state(self, broadcast.weights)

    def check_samples(self, samples: Mapping[int, int]) -> None:
        """Refuse clients with too few samples, if the method needs many; called before the first round.

        Args:
            samples: Number of training samples of each client of this architecture that takes part; at least one.

        Raises:
            ConfigurationError: Names a client, its samples, and what to do.
        """

    def check_run(self, facts: RunFacts) -> None:
        """Refuse settings of the run that would change the method; called before the first round.

        Raises:
            ConfigurationError: Says what is set, and what to do.
        """

    def before_fit(self, context: FitContext) -> Any:
        """Called with the received state, before the first phase; what it returns reaches :meth:`make_update`.

        A Python attribute that is set here would leak to the next client, which the same module serves (a warning says
        so after the first fit). What the steps of this fit need is assigned to a non-persistent buffer, such as a
        ``TensorDict(persistent=False)``.

        Args:
            context: Client, round, and its own data.
        """
        return None

    def before_evaluation(self, context: FitContext) -> None:
        """Called with the client's own state before it is evaluated, or fine-tuned for that; does nothing by default.

        It may write parameters and replace non-persistent buffers (``assign`` of a ``TensorDict``, or a new tensor as
        the attribute), which hold for this evaluation alone: novel clients, too, get here what belongs to their data,
        such as a cluster or a mixture. It runs without gradients (``torch.enable_grad`` allows them), in evaluation
        mode; clients whose buffers differ in shape are evaluated one by one.

        Args:
            context: Client, round, and its own data: the training part ``data``, and ``validation``.
        """

    def make_update(self, context: FitContext, before: Any) -> ClientUpdate:
        """Return the message to the server, after the last phase. Personal state is read afterwards.

        Args:
            context: Whose fit it was, in which round, on which data.
            before: What :meth:`before_fit` returned.
        """
        return ClientUpdate(
            client=context.client,
            round=context.round,
            num_samples=context.data.num_samples,
            weights=select_state(self, self.shared_names()),
        )

    def active_network(self) -> nn.Module | None:
        """Network that trains in the current phase, made by :meth:`copy_network`; ``None`` for encoder and head."""
        return None

    def check_personalization(self, personalization: Personalization) -> None:
        """Refuse a personalization stage that would not change the method's predictions; called before it begins."""

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Terms of the loss by name, those that the current phase :meth:`uses`; the loss is their sum.

        Args:
            features: Features of a batch, (N, d).
            labels: Labels, (N,).
        """
        if self.user_module is not None:
            return self.user_module.loss_terms()
        if not self.uses("cross_entropy"):
            return {}
        return {"cross_entropy": F.cross_entropy(self.classify(features), labels)}

    # ------------------------------------------------------------------ Lightning's hooks

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores, (N, C)."""
        if self.user_module is not None:
            return cast(Tensor, self.user_module.forward(inputs))
        return self.classify(self.encode(inputs))

    def encode(self, inputs: Tensor) -> Tensor:
        """Features (N, d) of inputs."""
        network = self.active_network()
        features: Tensor = (self if network is None else network).encoder(inputs)  # type: ignore[operator]
        return features

    def classify(self, features: Tensor) -> Tensor:
        """Class scores (N, C) of features (N, d)."""
        if self.user_module is not None and self.user_module.scores is not None:
            return self.user_module.scores
        network = self.active_network()
        scores: Tensor = (self if network is None else network).head(features)  # type: ignore[operator]
        return scores

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The loss of a batch and its named parts."""
        if self.user_module is not None:
            return cast(dict[str, Tensor], self.user_module.training_step(batch, batch_idx))
        inputs, labels = batch[:2]
        return self.sum_of_terms(self.loss_terms(self.encode(inputs), labels))

    def steps_on_features(self) -> bool:
        """Return whether the step of the current phase is the base's: encoder, then loss terms of features and labels.

        Where the encoder is frozen, the engines then compute the features once.
        """
        if self.user_module is not None:
            return False
        plain = type(self).training_step is FederatedClient.training_step and self.active_network() is None
        return plain and not self.phase.batch_statistics

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Class scores (N, C) of a batch: of its inputs, where it has labels beside them."""
        scores: Tensor = self(batch if isinstance(batch, Tensor) else batch[0])
        return scores

    def configure_optimizers(self) -> Any:
        """SGD over the parameters that train in the current phase, at the phase's rate; or a user's module's own."""
        if self.user_module is not None:
            return self.user_module.configure_optimizers()
        parameters = [p for p in self.parameters() if p.requires_grad]
        usual = partial(torch.optim.SGD, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        optimizer = (self.phase.optimizer or self._make_optimizer or usual)(parameters)
        for group in optimizer.param_groups:
            if self.phase.lr is not None:
                group["lr"] = self.phase.lr
            if self.phase.lr_share is not None:
                group["lr"] = group["lr"] * self.phase.lr_share
        if self._make_scheduler is None or self.phase.optimizer is not None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self._make_scheduler(optimizer)}

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log as in any LightningModule; a local fit without an inner Trainer averages the value over its steps."""
        if self._recorder is None:
            if not args and "on_step" not in kwargs and "on_epoch" not in kwargs:
                kwargs |= {"on_step": False, "on_epoch": True}  # a mean (of the last epoch), not the last step
            super().log(name, value, *args, **kwargs)
        elif isinstance(value, Metric):
            raise ConfigurationError(
                f"self.log({name!r}, a metric): SequentialEngine takes numbers; metrics need TrainerEngine"
            )
        else:
            self._recorder.setdefault(name, []).append(torch.as_tensor(value).detach().clone())

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Log several values, as :meth:`log` does."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    @contextmanager
    def recorded_logs(self, record: dict[str, list[Tensor]] | None = None) -> Iterator[dict[str, list[Tensor]]]:
        """Collect what :meth:`log` is given inside the block, in ``record`` or in a new dictionary."""
        if self.user_module is not None:
            with self.user_module.recorded_logs():
                yield {} if record is None else record
            return
        self._recorder = {} if record is None else record
        try:
            yield self._recorder
        finally:
            self._recorder = None
