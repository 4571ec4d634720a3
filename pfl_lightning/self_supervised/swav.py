"""SwAV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.self_supervised.objective import Objective, ObjectiveOutput, in_single_precision, of_both_views

if TYPE_CHECKING:
    from pfl_lightning.client import FitContext


SMALLEST_EPSILON = 0.0125
"""Smallest epsilon for which sums of exp(1 / epsilon) do not overflow in single precision."""


class SwAV(Objective):
    """SwAV: each view predicts the prototypes of the other, where a batch uses all prototypes equally.

    Source: M. Caron et al., Unsupervised Learning of Visual Features by Contrasting Cluster Assignments, NeurIPS 2020.
    Two views, no smaller crops and no queue. Prototypes are vectors on the unit sphere, without a bias, as in the
    paper. Its code normalizes the weights before every step. Here they are normalized at the start of every fit, and
    scores use normalized weights: the same descent up to the second order of the learning rate, by a training step that
    changes no parameter.

    Args:
        encoder: See :class:`~pfl_lightning.self_supervised.Objective`.
        hidden: See :class:`~pfl_lightning.self_supervised.Objective`.
        out: See :class:`~pfl_lightning.self_supervised.Objective`.
        prototypes: Number of prototypes.
        temperature: Temperature of the predictions.
        epsilon: Regularization of the Sinkhorn iterations, at least 0.0125; smaller values give harder assignments.
        iterations: Number of the Sinkhorn iterations.
    """

    shared = ("projector.*", "prototypes.*")

    def __init__(
        self,
        encoder: nn.Module,
        hidden: int = 2048,
        out: int = 256,
        prototypes: int = 512,
        temperature: float = 0.1,
        epsilon: float = 0.05,
        iterations: int = 3,
    ) -> None:
        super().__init__(encoder, hidden, out)
        check_at_least("prototypes", prototypes, 1)
        check_at_least("iterations", iterations, 1)
        check_number("temperature", temperature, strict=True)
        check_number("epsilon", epsilon, strict=True)
        if epsilon < SMALLEST_EPSILON:
            raise ConfigurationError(
                f"epsilon must be at least {SMALLEST_EPSILON}, got {epsilon}: the Sinkhorn iterations start from "
                "exp(cosine / epsilon), which overflows in single precision"
            )
        self.projector = self.heads.SwaVProjectionHead(self.in_features, hidden, out)
        self.prototypes = nn.Linear(out, prototypes, bias=False)
        self.swapped = self.losses.SwaVLoss(temperature, iterations, epsilon)

    @torch.no_grad()
    def before_fit(self, encoder: nn.Module, context: FitContext) -> None:
        """Normalize the prototypes, which averaging shortens: shorter ones would turn faster."""
        self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))

    def forward(self, encoder: nn.Module, first: Tensor, second: Tensor) -> ObjectiveOutput:
        """See :meth:`Objective.forward`."""
        encodings = of_both_views(encoder, first, second)
        projections = of_both_views(self.projector, *encodings)
        return ObjectiveOutput(in_single_precision(self._loss, *projections), encodings, projections)

    def _loss(self, one: Tensor, other: Tensor) -> Tensor:
        prototypes = F.normalize(self.prototypes.weight, dim=1)
        scores = [F.linear(F.normalize(view, dim=1), prototypes.to(view.dtype)) for view in (one, other)]
        loss: Tensor = self.swapped(scores, [])
        return loss.squeeze()
