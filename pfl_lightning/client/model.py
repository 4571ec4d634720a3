"""The model of a client, whoever made it: its features and head, how engines train, evaluate and copy it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.class_metrics import confusion_of, values_of
from pfl_lightning.client.declarations import Declarations
from pfl_lightning.data import SplitSource
from pfl_lightning.fit.context import FitContext
from pfl_lightning.fit.data import FitData
from pfl_lightning.fit.tasks import FitEnvironment, MakeTrainer, ScoringTask
from pfl_lightning.functional import nearest_neighbor_accuracy
from pfl_lightning.functional.numerics import hits
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.options import Schedule
from pfl_lightning.state.closures import copy_module

if TYPE_CHECKING:
    from pfl_lightning.client.base import FederatedClient
    from pfl_lightning.drop_in.features.feature_module import FeatureModule


class ModelAccess(Declarations):
    """What methods and engines ask of a client's model: of the package's own encoder and head, or of a user's module.

    A user's module gives features otherwise (``pfl_lightning.drop_in.features``), so that methods use these names in
    place of the layers.
    """

    feature_based: ClassVar[bool] = False
    """Whether the method needs, beyond a training step and parameters, no more than the features that enter a head and
    the classes of batches, so that it applies to any LightningModule that classifies
    (:func:`pfl_lightning.federate`)."""

    steps_on_modules: ClassVar[bool] = True
    """Whether a feature-based method trains a user's module by its own step, whose loss it adds to; otherwise by an
    objective of two views in the place of that."""

    scores_features: ClassVar[bool] = False
    """Whether a feature-based method passes features of its own through the head, which must then give class scores."""

    head_prefix: str = "head."
    """What names of the head's parameters begin with, in the client's state."""

    partner_encoder: Any = None
    """What makes the encoder of the method's second network, a registered name or a factory: the federation builds it,
    and gives it to :meth:`attach_partner`. ``None`` for no such network."""

    further_encoders: int = 0
    """Number of further encoders like its own that the client or its server begins with: the federation makes each with
    first weights of its own, and gives them to :meth:`take_encoders`."""

    evaluation: Literal["classifier", "knn"] = "classifier"
    """Evaluation by class scores or, where no head trains with the encoder, by k nearest neighbors (k = 1): whether the
    client's own training sample that is nearest in the space of features has the right class. After a personalization
    or a fine-tuning it is the class scores in any case."""

    exported_label: str | None = None
    """Name of an exported model's encoder, where it is not that of the client's architecture."""

    head: Any
    encoder: Any
    num_classes: int
    schedule: Schedule
    _make_scheduler: Any
    active_network: Any
    classify: Any
    personalization_phases: Any

    @property
    def _features(self) -> FeatureModule | None:
        """The user's module, which gives features to a method that is feature-based."""
        return cast("FeatureModule | None", self.user_module)

    @property
    def feature_width(self) -> int:
        """Width of the features, d."""
        if self._features is not None:
            return self._features.source.width
        return cast(int, self.head.in_features)

    def attach_partner(self, encoder: nn.Module) -> None:
        """Take the encoder that :attr:`partner_encoder` has made, with first weights that all architectures share."""
        raise NotImplementedError

    def take_encoders(self, encoders: Sequence[nn.Module]) -> None:
        """Take the further encoders; not called where the encoder is a module, of which there is one set of weights."""
        raise NotImplementedError

    def statistics_like(self) -> Tensor:
        """A tensor of the type and device that statistics of features are sent in."""
        weight: Tensor = next(self.head.parameters())
        return weight

    def copy_head(self) -> Any:
        """The head once more, for a server that trains it; it does not train by itself."""
        head = copy_module(self.head).requires_grad_(False)
        return head if isinstance(head, nn.Linear) else head.eval()  # of a user's module: without dropout

    def with_new_head(self, method: Any) -> Any:
        """A client of another method with a new head, on a copy of the encoder.

        All of the copy trains that was not frozen from the start, whatever trained last.
        """
        if self._features is not None:
            return self._features.with_new_head(method)
        encoder = copy_module(self.encoder)
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(f"encoder.{name}" not in self.frozen)
        return method(encoder, self.num_classes)

    def stand_in_with_new_head(self, method: Any) -> Any:
        """The same on the network that serves clients which have never trained, where it is another one for them.

        It is alike in all architectures. ``None``, by default, if they are served by the encoder as the others are.
        """
        return None

    def encoder_state(self) -> dict[str, Tensor]:
        """What of the client's state is the encoder that :meth:`with_new_head` copies, by its names there.

        Where a stand-in serves the client now, it is that of :meth:`stand_in_with_new_head`.
        """
        if self._features is not None:
            return self._features.encoder_state()
        return {f"encoder.{name}": value for name, value in self.encoder.state_dict().items()}

    def features_of(self, data: FitData) -> tuple[Tensor, Tensor]:
        """Features (n, d) of all samples at the current encoder, not augmented, without gradient; and labels (n,)."""
        if self._features is not None:
            return self._features.features_of(data)
        return data.features(self.encoder)

    def count_classes(self, context: FitContext) -> Tensor:
        """Training samples of each class, (C,)."""
        if self._features is not None:
            return self._features.count_classes(context)
        return context.data.class_counts(self.num_classes)

    def head_input(self, features: Tensor) -> Tensor:
        """What enters the head, (N, d): the features, or what a method makes of them."""
        return features

    def head_cross_entropy(self, entering: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of the head's scores alone; a user's module has its own loss in this place."""
        own = None if self.user_module is None else self.user_module.own_loss
        return F.cross_entropy(self.head(entering), labels) if own is None else own

    def class_scores(self, features: Tensor) -> Tensor:
        """Class scores (N, C) that the client is evaluated by, from features (N, d)."""
        scores: Tensor = self.classify(features)
        return scores

    def representations(self, features: Tensor) -> dict[str, Tensor]:
        """Representations between inputs and scores, by name: the features (N, d), and what is made of them.

        For inspection alone; names are what pictures and scalars call the representations.
        """
        return {"features": features}

    def view_terms(self, views: tuple[Tensor, ...], labels: Tensor) -> dict[str, Tensor]:
        """Further terms of the loss, from the features (N, d) of each augmented view of a batch; none by default."""
        return {}

    # ------------------------------------------------------------------ fits, evaluations and copies

    @property
    def hands_on(self) -> bool:
        """Whether a local fit hands anything on to the client's next, beside its state."""
        if self.user_module is not None:
            return self.user_module.hands_on
        return self.schedule == "continue"

    def evaluate(
        self, part: SplitSource, stage: str, data: FitData, environment: FitEnvironment, make_trainer: MakeTrainer
    ) -> EvalMetrics:
        """Return metrics of the model that the module holds, in evaluation mode.

        Args:
            part: The samples; at least one.
            stage: ``"validation"`` or ``"test"``.
            data: The client's own training data.
            environment: Device and precision.
            make_trainer: Makes an inner Trainer, in engines that have one, for a user's module.
        """
        if self.user_module is not None:
            return self.user_module.evaluate(ScoringTask(part, stage, data, environment, make_trainer))
        if self.uses_knn_evaluation():
            return score_neighbors(self.encoder, part, data, environment)
        return score_part(self, part, data.eval_batch_size, environment)

    def fit_under_trainer(
        self, make_trainer: MakeTrainer, context: FitContext, generator: torch.Generator
    ) -> dict[str, float]:
        """Train through the current phase under an inner Trainer; return what it logged, by name.

        Args:
            make_trainer: Makes the Trainer.
            context: Client, round and data.
            generator: Draws batch orders and augmentations.
        """
        if self.user_module is not None:
            return self.user_module.fit_under_trainer(make_trainer, context, generator)
        trainer = make_trainer()
        assert trainer is not None
        try:
            trainer.fit(self, train_dataloaders=context.data.loader(generator))
        finally:
            self.trainer = None
            self.to(context.data.device)  # the inner Trainer's teardown moves its module to the CPU
            self.train()
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    def exported_module(self) -> L.LightningModule:
        """Module that a client's owner gets of a copy of it; all of it may train again but what is frozen."""
        if self.user_module is not None:
            return self.user_module.exported_module()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return self

    def inspected_module(self) -> FederatedClient:
        """Client in which inspection finds the network that it is evaluated with as its own; a copy where it is not."""
        return cast("FederatedClient", self)

    def copy_network(self) -> nn.Module:
        """Encoder and head once more, with the same weights; what is frozen is the same, not a copy."""
        if self.user_module is not None:
            return self.user_module.copy_network()
        memo: dict[int, Any] = {id(p): p for name, p in self.named_parameters() if name in self.frozen}
        return nn.ModuleDict({"encoder": copy_module(self.encoder, memo), "head": copy_module(self.head, memo)})

    def network_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the own network, by their names in :meth:`copy_network`; not those that are frozen."""
        if self.user_module is not None:
            return self.user_module.network_parameters()
        own = ((name, p) for name, p in self.named_parameters() if name.startswith(("encoder.", "head.")))
        return {name: p for name, p in own if name not in self.frozen}

    def uses_knn_evaluation(self) -> bool:
        """Return whether an evaluation uses nearest neighbors now: no head was trained for it."""
        return self.evaluation == "knn" and not self.personalization_phases()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy, in which a user's module that cannot be copied is made once more."""
        if self.user_module is not None:
            self.user_module.prepare_copy(memo)
        memo[id(self)] = other = type(self).__new__(type(self))
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        if self.user_module is not None:
            self.user_module.conclude_copy(cast("FederatedClient", other))
        return other


def score_part(model: nn.Module, part: SplitSource, batch_size: int, environment: FitEnvironment) -> EvalMetrics:
    """Accuracy, mean cross entropy and further metrics of the environment, without gradients.

    Args:
        model: From inputs to class scores (N, C), in evaluation mode.
        part: The samples; at least one.
        batch_size: Samples at a time.
        environment: Device and precision.
    """
    right = torch.zeros((), dtype=torch.int64, device=environment.device)
    loss = torch.zeros((), dtype=torch.float32, device=environment.device)  # whatever the default type is
    seen: list[tuple[Tensor, Tensor]] = []  # all of them, where metrics need all at once
    for piece in part.split(batch_size):
        x, y = piece.loader(batch_size, device=environment.device).tensors()
        with environment.precision.forward_context():
            scores = model(environment.precision.convert_input(x))
        if environment.metrics or environment.confusion:
            seen.append((scores, y))
        right += hits(scores, y).sum()
        loss += F.cross_entropy(scores.float(), y, reduction="sum")
    found: dict[str, Any] = {}
    if seen:
        every = [*map(torch.cat, zip(*seen, strict=True))]
        found["further"] = values_of(environment.metrics, *every)
        found["confusion"] = confusion_of(*every) if environment.confusion else ()
    return EvalMetrics(float(right) / len(part), float(loss) / len(part), len(part), **found)


def score_neighbors(encoder: nn.Module, part: SplitSource, data: FitData, environment: FitEnvironment) -> EvalMetrics:
    """Accuracy of the nearest of the client's training samples, in the space of the features; there is no loss (NaN).

    Args:
        encoder: The network, in evaluation mode.
        part: The samples; at least one.
        data: The client's own training data.
        environment: Device and precision.
    """
    known, classes = data.features(encoder)
    right = 0.0
    for piece in part.split(data.eval_batch_size):
        inputs, targets = piece.loader(data.eval_batch_size, device=environment.device).tensors()
        with environment.precision.forward_context():
            features = encoder(environment.precision.convert_input(inputs))
        right += len(piece) * float(nearest_neighbor_accuracy(known.float(), classes, features.float(), targets))
    return EvalMetrics(right / len(part), math.nan, len(part))
