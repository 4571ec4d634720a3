"""How engines train, evaluate and copy a client."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

from pfl_lightning.data import SplitSource
from pfl_lightning.fit.context import FitContext
from pfl_lightning.fit.data import FitData
from pfl_lightning.fit.tasks import FitEnvironment, MakeTrainer
from pfl_lightning.functional import nearest_neighbor_accuracy
from pfl_lightning.functional.numerics import hits
from pfl_lightning.metrics import EvalMetrics
from pfl_lightning.options import Schedule
from pfl_lightning.state.closures import copy_module

if TYPE_CHECKING:
    from pfl_lightning.client.base import FederatedClient
    from pfl_lightning.drop_in.client.user_module import UserModule


class FitAccess(L.LightningModule):
    """What engines call of a client: of its own encoder and head, or of the user's module that it has."""

    user_module: UserModule | None

    evaluation: Literal["classifier", "knn"] = "classifier"
    """Evaluation by class scores or, where no head trains with the encoder, by k nearest neighbors (k = 1): whether the
    client's own training sample that is nearest in the space of features has the right class. After a personalization
    or a fine-tuning it is the class scores in any case."""

    exported_label: str | None = None
    """Name of an exported model's encoder, where it is not that of the client's architecture."""

    schedule: Schedule
    _make_scheduler: Any
    encoder: Any
    head: Any
    frozen: Any
    personalization_phases: Any

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
            return self.user_module.evaluate(part, stage, data, environment, make_trainer)
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
    """Accuracy and mean cross entropy, without gradients.

    Args:
        model: From inputs to class scores (N, C), in evaluation mode.
        part: The samples; at least one.
        batch_size: Samples at a time.
        environment: Device and precision.
    """
    right = torch.zeros((), dtype=torch.int64, device=environment.device)
    loss = torch.zeros((), dtype=torch.float32, device=environment.device)  # whatever the default type is
    for piece in part.split(batch_size):
        x, y = piece.loader(batch_size, device=environment.device).tensors()
        with environment.precision.forward_context():
            scores = model(environment.precision.convert_input(x))
        right += hits(scores, y).sum()
        loss += F.cross_entropy(scores.float(), y, reduction="sum")
    return EvalMetrics(float(right) / len(part), float(loss) / len(part), len(part))


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
