"""SimSiam."""

from __future__ import annotations

from torch import Tensor, nn

from pfl_lightning.checks import check_at_least
from pfl_lightning.self_supervised import _lightly
from pfl_lightning.self_supervised.objective import Objective, ObjectiveOutput, in_single_precision, of_each_view

__all__ = ["SimSiam"]


class SimSiam(Objective):
    """SimSiam: a predictor maps one view's projection to the other view's projection, which gets no gradient.

    Source: X. Chen and K. He, Exploring Simple Siamese Representation Learning, CVPR 2021. The projector has three
    layers, as there.

    Args:
        encoder: See :class:`~pfl_lightning.self_supervised.Objective`.
        hidden: See :class:`~pfl_lightning.self_supervised.Objective`.
        out: See :class:`~pfl_lightning.self_supervised.Objective`.
        predictor_hidden: Width of the predictor's hidden layer; ``None`` is a quarter of ``out``, as in the paper.
    """

    shared = ("projector.*", "predictor.*")

    def __init__(
        self, encoder: nn.Module, hidden: int = 2048, out: int = 256, predictor_hidden: int | None = None
    ) -> None:
        super().__init__(encoder, hidden, out)
        narrow = max(out // 4, 1) if predictor_hidden is None else predictor_hidden
        check_at_least("predictor_hidden", narrow, 1)
        heads = _lightly.heads("SimSiam")
        self.projector = heads.SimSiamProjectionHead(self.in_features, hidden, out)
        self.predictor = heads.SimSiamPredictionHead(out, narrow, out)
        self.negative_cosine = _lightly.losses("SimSiam").NegativeCosineSimilarity()

    def forward(self, encoder: nn.Module, first: Tensor, second: Tensor) -> ObjectiveOutput:
        """See :meth:`Objective.forward`."""
        encodings = of_each_view(encoder, first, second)
        projections = of_each_view(self.projector, *encodings)
        predicted = of_each_view(self.predictor, *projections)
        return ObjectiveOutput(in_single_precision(self._loss, *predicted, *projections), encodings, projections)

    def _loss(self, one: Tensor, other: Tensor, projected: Tensor, other_projected: Tensor) -> Tensor:
        near, far = projected.detach(), other_projected.detach()
        loss: Tensor = 0.5 * (self.negative_cosine(one, far) + self.negative_cosine(other, near))
        return loss
