"""FedBABU."""

from __future__ import annotations

from typing import Any

from torch import nn

from pfl_lightning.client import Citation, FederatedClient, Phase


class FedBABU(FederatedClient):
    """Only the encoder (the body) trains and travels; the head stays as it was initialized until a client fine-tunes.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        fine_tune: What is fine-tuned before the evaluation: ``"all"``, ``"head"`` or ``None``.
        fine_tune_epochs: Epochs of the fine-tuning. They are spent at every evaluation; the Trainer's
            ``check_val_every_n_epoch`` makes evaluations rarer.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "FedBABU: Toward Enhanced Representation for Federated Image Classification", "Oh et al.", "ICLR", 2022
    )
    model_agnostic = True
    shared = ("encoder.*",)
    batch_norm = "shared"
    fixed = ("head.*",)

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        fine_tune: str | None = "all",
        fine_tune_epochs: int = 5,
        **options: Any,
    ) -> None:
        super().__init__(encoder, num_classes, fine_tune=fine_tune, fine_tune_epochs=fine_tune_epochs, **options)

    def phases(self) -> tuple[Phase, ...]:
        """Algorithm 1: the body alone."""
        return (Phase("encoder", ("encoder.*",), self.epochs),)
