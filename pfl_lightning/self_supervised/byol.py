"""BYOL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pfl_lightning.self_supervised.objective import Objective, ObjectiveOutput, in_single_precision, of_each_view
from pfl_lightning.self_supervised.target import TargetNetwork

if TYPE_CHECKING:
    from pfl_lightning.client import FitContext


class BYOL(Objective):
    """BYOL: a predictor maps one view's projection to the other view's projection by a target network.

    Source: J.-B. Grill et al., Bootstrap Your Own Latent, NeurIPS 2020. The momentum is constant, whereas the paper
    raises it to 1 over a training; 0.99 is that of FedEMA.

    Args:
        encoder: See :class:`~pfl_lightning.self_supervised.Objective`.
        hidden: Width of the hidden layers of projector and predictor.
        out: See :class:`~pfl_lightning.self_supervised.Objective`.
        momentum: Momentum of the target network, in [0, 1].
        keep_target: Whether a client keeps its target network from fit to fit; otherwise every fit starts from a copy
            of the received networks.
        batch_norm: Whether batch normalization follows the hidden layers of projector and predictor.
        squared_distances: Whether the loss is the paper's, the squared distances of vectors of unit length, of both
            directions added: 4 - 2 (cos + cos'). Otherwise it is - (cos + cos') / 2, as in lightly's examples and in
            Calibre's published code, with a quarter of the gradient: choose the learning rate accordingly.
    """

    shared = ("projector.*", "predictor.*")

    def __init__(
        self,
        encoder: nn.Module,
        hidden: int = 2048,
        out: int = 256,
        momentum: float = 0.99,
        keep_target: bool = False,
        batch_norm: bool = True,
        squared_distances: bool = False,
    ) -> None:
        super().__init__(encoder, hidden, out)
        self.projector = _head(self.heads, self.in_features, hidden, out, batch_norm)
        self.predictor = _head(self.heads, out, hidden, out, batch_norm)
        self.target = TargetNetwork(encoder, self.projector, momentum=momentum, keep=keep_target)
        self.squared_distances = squared_distances
        self.negative_cosine = self.losses.NegativeCosineSimilarity()

    def before_fit(self, encoder: nn.Module, context: FitContext) -> None:
        """Start the target network."""
        self.target.start(encoder, self.projector)

    def forget(self) -> None:
        """Discard the client's target network."""
        self.target.forget()

    def forward(self, encoder: nn.Module, first: Tensor, second: Tensor) -> ObjectiveOutput:
        """See :meth:`Objective.forward`."""
        self.target.follow(encoder, self.projector)
        encodings = of_each_view(encoder, first, second)
        projections = of_each_view(self.projector, *encodings)
        predicted = of_each_view(self.predictor, *projections)
        targets = of_each_view(self.target, first, second)
        return ObjectiveOutput(in_single_precision(self._loss, *predicted, *targets), encodings, projections)

    def _loss(self, one: Tensor, other: Tensor, target: Tensor, other_target: Tensor) -> Tensor:
        cosines: Tensor = self.negative_cosine(one, other_target) + self.negative_cosine(other, target)
        return 4 + 2 * cosines if self.squared_distances else 0.5 * cosines


def _head(heads: Any, width: int, hidden: int, out: int, batch_norm: bool) -> nn.Module:
    """Linear - BN - ReLU - Linear: lightly's ``BYOLProjectionHead``, with batch normalization or without."""
    norm = nn.BatchNorm1d(hidden) if batch_norm else None
    blocks = [(width, hidden, norm, nn.ReLU()), (hidden, out, None, None)]
    head: nn.Module = heads.ProjectionHead(blocks)
    return head
