"""FedBABU."""

from __future__ import annotations

from torch import nn

from pfl_lightning.client import Citation, FederatedClient, Phase
from pfl_lightning.options import TrainingOptions, Unpack


class FedBABU(FederatedClient):
    """Only the encoder (the body) trains and is shared; the head stays as it was initialized until a client fine-tunes.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        fine_tune: Part that is fine-tuned before the evaluation: ``"all"``, ``"head"`` or ``None``.
        fine_tune_epochs: Epochs of the fine-tuning. They are spent at every evaluation; the Trainer's
            ``check_val_every_n_epoch`` makes evaluations rarer.
        fine_tune_lr: Learning rate of the fine-tuning; ``None`` takes ``lr``.
        eval_model: See :class:`~pfl_lightning.client.FederatedClient`.
        by_samples: Whether the server weighs clients by their numbers of samples; otherwise all count the same, as in
            the published code.
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
        fine_tune_lr: float | None = None,
        eval_model: str | None = None,
        by_samples: bool = True,
        **options: Unpack[TrainingOptions],
    ) -> None:
        super().__init__(
            encoder,
            num_classes,
            fine_tune=fine_tune,
            fine_tune_epochs=fine_tune_epochs,
            fine_tune_lr=fine_tune_lr,
            eval_model=eval_model,
            **options,
        )
        self.by_samples = by_samples

    def phases(self) -> tuple[Phase, ...]:
        """Algorithm 1: the body alone."""
        return (Phase("encoder", ("encoder.*",), self.epochs),)
