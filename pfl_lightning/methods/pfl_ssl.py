"""pFL-SSL: self-supervised federated training with plain averaging (pFL-SimCLR, pFL-BYOL, ...)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from pfl_lightning.client import Batch, Citation, FederatedClient, FitContext, Phase
from pfl_lightning.options import OptionsWithoutSGD, Unpack
from pfl_lightning.self_supervised import ObjectiveFactory, make_objective
from pfl_lightning.self_supervised.client_parts import (
    fitting_phases,
    learn_from_views,
    objective_phases,
    objective_shared,
    sum_of_terms,
)

__all__ = ["PFLSSL"]


class PFLSSL(FederatedClient):
    """Clients train an encoder by a self-supervised objective; encoder and projector are averaged (section III-B).

    The baselines of Calibre: pFL-SimCLR, pFL-BYOL, pFL-SimSiam, pFL-MoCoV2, and likewise SwAV and SMoG. The head is
    each client's own and does not train in this stage.

    Every batch has two augmented views of each sample. ``drop_last`` is advised: objectives compare the samples of a
    batch, and batch normalization cannot train on a single one.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        objective: ``"simclr"``, ``"byol"``, ``"simsiam"``, ``"mocov2"``, ``"swav"``, ``"smog"``, or what makes a
            :class:`~pfl_lightning.self_supervised.Objective` from the encoder.
        lr: Learning rate.
        momentum: Momentum.
        weight_decay: Weight decay.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "Calibre: Towards Fair and Accurate Personalized Federated Learning with Self-Supervised Learning",
        "Chen et al.",
        "ICDCS",
        2024,
    )
    batch_norm = "shared"
    evaluation = "knn"  # until a head is fitted
    uses_unlabeled_data = True
    views = 2

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        objective: str | ObjectiveFactory = "simclr",
        lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        **options: Unpack[OptionsWithoutSGD],
    ) -> None:
        super().__init__(encoder, num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay, **options)
        self.objective = make_objective(objective, encoder)
        self.shared = objective_shared(self.objective)

    def phases(self) -> tuple[Phase, ...]:
        """E epochs of encoder and objective."""
        return objective_phases(self.epochs)

    def personalization_phases(self) -> tuple[Phase, ...]:
        """What the options ask for, on single views without augmentation."""
        return fitting_phases(super().personalization_phases())

    def steps_on_features(self) -> bool:
        """Whether the step is the base's: in a personalization."""
        return self.phase.name == "fine_tune"

    def check_samples(self, samples: Mapping[int, int]) -> None:
        """What the objective asks of clients' numbers of samples."""
        self.objective.check_samples(samples)

    def before_fit(self, context: FitContext) -> None:
        """Start what the objective makes anew in every fit."""
        self.objective.before_fit(self.encoder, context)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The objective's loss of two views, inputs of shape (B, 2, ...); in the personalization the head's."""
        if self.phase.name == "fine_tune":
            return super().training_step(batch, batch_idx)
        return sum_of_terms({"self_supervised": learn_from_views(self.objective, self.encoder, batch).loss})
