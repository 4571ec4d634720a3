"""FedRep."""

from __future__ import annotations

from torch import nn

from pfl_lightning.checks import check_at_least, check_learning_rate
from pfl_lightning.client import Citation, FederatedClient, Phase
from pfl_lightning.options import ClientOptions, Unpack


class FedRep(FederatedClient):
    """The head is personal and trains first, on the received encoder; then the encoder trains under the new head.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        head_epochs: Epochs of the head. The paper's own experiments take 10, with one epoch of the encoder
            (``epochs=1``); comparisons at equal work take few.
        head_lr: Learning rate of the head; ``None`` takes ``lr``.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`; ``epochs`` is the encoder's.
    """

    citation = Citation(
        "Exploiting Shared Representations for Personalized Federated Learning", "Collins et al.", "ICML", 2021
    )
    model_agnostic = True
    shared = ("encoder.*",)
    batch_norm = "shared"

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        head_epochs: int = 1,
        head_lr: float | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_at_least("head_epochs", head_epochs, 0)
        check_learning_rate("head_lr", head_lr, optional=True)
        self.head_epochs, self.head_lr = head_epochs, head_lr

    def phases(self) -> tuple[Phase, ...]:
        """Algorithm 1, client update: the head, then the representation."""
        return (
            Phase("head", ("head.*",), self.head_epochs, self.head_lr),
            Phase("encoder", ("encoder.*",), self.epochs),
        )
