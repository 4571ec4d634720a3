"""SimCLR."""

from __future__ import annotations

from torch import Tensor, nn

from pfl_lightning.checks import check_number
from pfl_lightning.self_supervised import _lightly
from pfl_lightning.self_supervised.objective import Objective, ObjectiveOutput, in_single_precision, of_both_views

__all__ = ["SimCLR"]


class SimCLR(Objective):
    """SimCLR: NT-Xent, for which the views of a sample are closer to one another than to other views of the batch.

    Source: T. Chen, S. Kornblith, M. Norouzi and G. Hinton, A Simple Framework for Contrastive Learning of Visual
    Representations, ICML 2020. As in its code, batch normalization sees both views of a batch together.

    Args:
        encoder: See :class:`~pfl_lightning.self_supervised.Objective`.
        hidden: See :class:`~pfl_lightning.self_supervised.Objective`.
        out: See :class:`~pfl_lightning.self_supervised.Objective`.
        temperature: Temperature of NT-Xent.
        batch_norm: Whether batch normalization follows both layers of the projector.
    """

    def __init__(
        self,
        encoder: nn.Module,
        hidden: int = 2048,
        out: int = 256,
        temperature: float = 0.2,
        batch_norm: bool = True,
    ) -> None:
        super().__init__(encoder, hidden, out)
        check_number("temperature", temperature, strict=True)
        make_head = _lightly.heads("SimCLR").SimCLRProjectionHead
        self.projector = make_head(self.in_features, hidden, out, batch_norm=batch_norm)
        self.nt_xent = _lightly.losses("SimCLR").NTXentLoss(temperature)

    def forward(self, encoder: nn.Module, first: Tensor, second: Tensor) -> ObjectiveOutput:
        """See :meth:`Objective.forward`."""
        encodings = of_both_views(encoder, first, second)
        projections = of_both_views(self.projector, *encodings)
        return ObjectiveOutput(in_single_precision(self.nt_xent, *projections), encodings, projections)
