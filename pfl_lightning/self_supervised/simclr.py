"""SimCLR."""

from __future__ import annotations

from torch import Tensor, nn

from pfl_lightning.checks import check_number
from pfl_lightning.self_supervised.objective import (
    Objective,
    ObjectiveOutput,
    in_single_precision,
    of_both_views,
    of_each_view,
)


class SimCLR(Objective):
    """SimCLR: NT-Xent, for which the views of a sample are closer to one another than to other views of the batch.

    Source: T. Chen, S. Kornblith, M. Norouzi and G. Hinton, A Simple Framework for Contrastive Learning of Visual
    Representations, ICML 2020. As in its code, batch normalization sees both views of a batch together by default.

    Args:
        encoder: See :class:`~pfl_lightning.self_supervised.Objective`.
        hidden: See :class:`~pfl_lightning.self_supervised.Objective`.
        out: See :class:`~pfl_lightning.self_supervised.Objective`.
        temperature: Temperature of NT-Xent.
        batch_norm: Whether batch normalization follows both layers of the projector.
        separate_views: Whether each view of a batch goes through encoder and projector by itself, so that batch
            normalization sees one view at a time.
    """

    def __init__(
        self,
        encoder: nn.Module,
        hidden: int = 2048,
        out: int = 256,
        temperature: float = 0.2,
        batch_norm: bool = True,
        separate_views: bool = False,
    ) -> None:
        super().__init__(encoder, hidden, out)
        check_number("temperature", temperature, strict=True)
        self.separate_views = separate_views
        make_head = self.heads.SimCLRProjectionHead
        self.projector = make_head(self.in_features, hidden, out, batch_norm=batch_norm)
        self.nt_xent = self.losses.NTXentLoss(temperature)

    def forward(self, encoder: nn.Module, first: Tensor, second: Tensor) -> ObjectiveOutput:
        """See :meth:`Objective.forward`."""
        of_views = of_each_view if self.separate_views else of_both_views
        encodings = of_views(encoder, first, second)
        projections = of_views(self.projector, *encodings)
        return ObjectiveOutput(in_single_precision(self.nt_xent, *projections), encodings, projections)
