"""Fed-RoD: robust decoupling."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_choice
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.functional import balanced_softmax_loss
from pfl_lightning.options import ClientOptions, Unpack


class FedRoD(FederatedClient):
    """A shared encoder and generic head under a balanced loss, and a personal head that learns what the sum lacks.

    The generic head (``head``) and the encoder minimize the balanced softmax loss (after Ren et al. 2020), so that
    local class imbalance does not bias what is averaged. The personal head minimizes the cross entropy of the sum of
    both heads' scores, on features and generic scores that it does not change.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        prediction: ``"personal"`` predicts by the sum of both heads, ``"generic"`` by the generic head alone.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "On Bridging Generic and Personalized Federated Learning for Image Classification",
        "Chen and Chao",
        "ICLR",
        2022,
    )
    feature_based = True
    scores_features = True
    batch_norm = "shared"
    heads = ("head.*", "personal_head.*")
    averages_samples = True
    loss_names = ("balanced_softmax", "personal_cross_entropy")
    personalization_losses = ("cross_entropy",)  # nothing of it is averaged, so that local imbalance may stay

    class_counts: Tensor

    def __init__(
        self, encoder: nn.Module, num_classes: int, *, prediction: str = "personal", **options: Unpack[ClientOptions]
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_choice("prediction", prediction, ("personal", "generic"))
        self.prediction = prediction
        self.personal_head = nn.Linear(self.feature_width, num_classes)
        self.register_buffer("class_counts", torch.zeros(num_classes), persistent=False)

    def before_fit(self, context: FitContext) -> None:
        """The client's own class counts, for the balanced loss."""
        self.class_counts.copy_(self.count_classes(context))

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The generic part's balanced loss and the personal head's cross entropy; in fine-tuning, the plain one."""
        terms = super().loss_terms(features, labels)
        balanced, personal = self.uses("balanced_softmax"), self.uses("personal_cross_entropy")
        if not (balanced or personal):
            return terms
        generic = self.head(features)
        if balanced:
            terms["balanced_softmax"] = balanced_softmax_loss(generic, labels, self.class_counts)
        if personal:
            scores = generic.detach() + self.personal_head(features.detach())
            terms["personal_cross_entropy"] = F.cross_entropy(scores, labels)
        return terms

    def classify(self, features: Tensor) -> Tensor:
        """Scores (N, C) of both heads together, or of the generic one."""
        generic: Tensor = self.head(features)
        return generic if self.prediction == "generic" else generic + self.personal_head(features)
