"""pFL-SSL: self-supervised federated training with plain averaging (pFL-SimCLR, pFL-BYOL, ...)."""

from __future__ import annotations

from torch import nn

from pfl_lightning.client import Citation
from pfl_lightning.methods._self_supervised import SelfSupervisedClient
from pfl_lightning.options import OptionsWithoutSGD, Unpack
from pfl_lightning.self_supervised import ObjectiveFactory


class PFLSSL(SelfSupervisedClient):
    """Clients train an encoder by a self-supervised objective (section III-B); encoder and projector are averaged.

    The baselines of Calibre: pFL-SimCLR, pFL-BYOL, pFL-SimSiam, pFL-MoCoV2, pFL-SwAV and pFL-SMoG. The head is
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
    paper_batch_size = 128

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
        super().__init__(
            encoder, num_classes, objective=objective, lr=lr, momentum=momentum, weight_decay=weight_decay, **options
        )
