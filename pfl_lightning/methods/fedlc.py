"""FedLC: scores calibrated by a client's class counts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.options import ClientOptions, Unpack


class FedLC(FederatedClient):
    """FedAvg whose local loss asks for a larger margin of classes that a client has few samples of.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        tau: Scale of the margins; 0 is FedAvg on the classes that a client has.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "Federated Learning with Label Distribution Skew via Logits Calibration", "Zhang et al.", "ICML", 2022
    )
    feature_based = True
    scores_features = True
    batch_norm = "shared"
    averages_samples = True
    loss_names = ("calibrated",)
    personalization_losses = ("cross_entropy",)

    class_counts: Tensor

    def __init__(
        self, encoder: nn.Module, num_classes: int, *, tau: float = 1.0, **options: Unpack[ClientOptions]
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("tau", tau)
        self.tau = tau
        self.register_buffer("class_counts", torch.zeros(num_classes), persistent=False)  # n_c

    def before_fit(self, context: FitContext) -> None:
        """The client's own class counts."""
        self.class_counts.copy_(self.count_classes(context))

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The calibrated cross entropy; in fine-tuning, the plain one."""
        terms = super().loss_terms(features, labels)
        if self.uses("calibrated"):
            terms["calibrated"] = calibrated_loss(self.classify(features), labels, self.class_counts, self.tau)
        return terms


def calibrated_loss(scores: Tensor, labels: Tensor, counts: Tensor, tau: float) -> Tensor:
    """Cross entropy of the scores f_c - tau n_c^(-1/4) (10); classes that a client lacks have no share in it.

    Args:
        scores: (N, C) scores f.
        labels: (N,) classes, each of which the client has.
        counts: (C,) samples of each class, n_c.
        tau: Scale of the margins.

    Returns:
        A scalar, the mean over samples.

    Example:
        >>> import torch
        >>> from pfl_lightning.methods.fedlc import calibrated_loss
        >>> counts = torch.tensor([16.0, 1.0, 0.0])  # margins of 1/2 and 1, and no third class
        >>> calibrated_loss(torch.zeros(1, 3), torch.tensor([1]), counts, tau=1.0)  # log(1 + e^(1/2))
        tensor(0.9741)
    """
    margins = tau * counts.clamp(min=1) ** -0.25
    calibrated = (scores - margins).masked_fill(counts == 0, -torch.inf)
    return F.cross_entropy(calibrated, labels)
