"""Base of the clients that train on a self-supervised objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from pfl_lightning.client import Batch, FederatedClient, FitContext, Phase
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.self_supervised import ObjectiveFactory, ObjectiveOutput, make_objective


class SelfSupervisedOptions(ClientOptions, total=False):
    """Keyword arguments of :class:`~pfl_lightning.methods.PFLSSL`, where they are described."""

    objective: str | ObjectiveFactory


class SelfSupervisedClient(FederatedClient):
    """Client whose encoder trains on an objective of two augmented views, without labels.

    Encoder and objective are shared, except for what the objective keeps to itself. The head is each client's own and
    trains in a personalization alone, on single views without augmentation.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        objective: Name of an objective, or what makes a :class:`~pfl_lightning.self_supervised.Objective` from the
            encoder.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    shared: tuple[str, ...] = ("encoder.*", "objective.*")  # an instance narrows it to what its objective shares
    feature_based = True
    steps_on_modules = False
    batch_norm = "shared"
    evaluation = "knn"  # until a head is fitted
    loss_names: ClassVar[tuple[str, ...]] = ("self_supervised",)
    personalization_losses = ("cross_entropy",)
    exported_losses = ("self_supervised",)
    uses_unlabeled_data = True
    views = 2

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        objective: str | ObjectiveFactory,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        self.objective = make_objective(objective, self.encoder)
        self.shared = ("encoder.*", *(f"objective.{pattern}" for pattern in self.objective.shared))

    def phases(self) -> tuple[Phase, ...]:
        """E epochs of encoder and objective."""
        return (Phase("self_supervised", ("encoder.*", "objective.*"), self.epochs),)

    def personalization_phases(self) -> tuple[Phase, ...]:
        """Phases that the options ask for, on single views without augmentation."""
        return tuple(replace(phase, plain=True) for phase in super().personalization_phases())

    def steps_on_features(self) -> bool:
        """Return whether the step of the current phase is the base's: in a personalization."""
        return not self.uses("self_supervised")

    def check_samples(self, samples: Mapping[int, int]) -> None:
        """Refuse clients with fewer samples than the objective needs."""
        self.objective.check_samples(samples)

    def before_fit(self, context: FitContext) -> Any:
        """Start what the objective makes again in every fit."""
        self.objective.before_fit(self.encoder, context)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Loss of two views of a batch, inputs of shape (B, 2, ...); in a personalization the head's."""
        if not self.uses("self_supervised"):
            return super().training_step(batch, batch_idx)
        first, second = batch[0].unbind(1)
        return self.sum_of_terms(self.objective_terms(self.objective(self.encoder, first, second)))

    def objective_terms(self, output: ObjectiveOutput) -> dict[str, Tensor]:
        """Terms of the loss by name, from the objective's output for a batch; labels play no part."""
        return {"self_supervised": output.loss}
