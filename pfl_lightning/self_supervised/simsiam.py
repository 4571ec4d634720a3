"""SimSiam."""

from __future__ import annotations

from torch import Tensor, nn

from pfl_lightning.self_supervised.objective import Objective, ObjectiveOutput, in_single_precision, of_each_view


class SimSiam(Objective):
    """SimSiam: a predictor maps one view's projection to the other view's projection, which gets no gradient.

    Source: X. Chen and K. He, Exploring Simple Siamese Representation Learning, CVPR 2021. The projector has three
    layers, as there, and the predictor's hidden layer has a quarter of ``out`` units.

    Args:
        encoder: See :class:`~pfl_lightning.self_supervised.Objective`.
        hidden: See :class:`~pfl_lightning.self_supervised.Objective`.
        out: See :class:`~pfl_lightning.self_supervised.Objective`.
    """

    shared = ("projector.*", "predictor.*")

    def __init__(self, encoder: nn.Module, hidden: int = 2048, out: int = 256) -> None:
        super().__init__(encoder, hidden, out)
        self.projector = self.heads.SimSiamProjectionHead(self.in_features, hidden, out)
        self.predictor = self.heads.SimSiamPredictionHead(out, max(out // 4, 1), out)
        self.negative_cosine = self.losses.NegativeCosineSimilarity()

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
