"""SwAV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.self_supervised import _lightly
from pfl_lightning.self_supervised.objective import Objective, ObjectiveOutput, in_single_precision, of_both_views

if TYPE_CHECKING:
    from pfl_lightning.client import FitContext

__all__ = ["SwAV"]

SMALLEST_EPSILON = 0.0125
"""Of the exponentials exp(1 / epsilon), many are added up in single precision."""


class SwAV(Objective):
    """Each view foretells to which prototypes the other is assigned, all prototypes being used alike in a batch.

    Source: M. Caron et al., Unsupervised Learning of Visual Features by Contrasting Cluster Assignments, NeurIPS 2020.
    Two views, no smaller crops and no queue. Prototypes are vectors on the unit sphere, without a bias, as in the
    paper; where its code divides the weights by their length before every step, here they are divided at the start of
    every fit, and the scores are those of the weights divided by their length, which is the same descent up to the
    second order of the learning rate, and leaves a training step that changes no parameter.

    Args:
        encoder: See :class:`~pfl_lightning.self_supervised.Objective`.
        hidden: See there.
        out: See there.
        prototypes: Number of prototypes.
        temperature: Of the predictions.
        epsilon: Of the Sinkhorn iterations; the smaller, the harder the assignments; at least 0.0125.
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
            raise ValueError(
                f"epsilon must be at least {SMALLEST_EPSILON}, got {epsilon}: the Sinkhorn iterations start from "
                "exp(cosine / epsilon), which overflows in single precision"
            )
        self.projector = _lightly.heads("SwAV").SwaVProjectionHead(self.in_features, hidden, out)
        self.prototypes = nn.Linear(out, prototypes, bias=False)
        self.swapped = _lightly.losses("SwAV").SwaVLoss(temperature, iterations, epsilon)

    @torch.no_grad()
    def before_fit(self, encoder: nn.Module, context: FitContext) -> None:
        """Bring the prototypes to the unit sphere, from which an average takes them: shorter ones turn faster."""
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
