"""Clients that are pulled to global prototypes of the classes, and predict by the nearest; numbers are of FedProto."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_choice, check_number
from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional import alignment_loss
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.methods._class_means import (
    ClassMeansBroadcast,
    ReceivedMeans,
    class_means_update,
)
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.phases import Personalization

__all__ = ["PrototypeClient"]


class PrototypeClient(FederatedClient):
    """Shares prototypes alone: uploads class means of its features, and receives global ones.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; encoders may differ, their feature width may not.
        num_classes: Number of classes, C.
        alignment: lambda, the weight of the distance to the global prototypes.
        prediction: ``"prototype"`` or ``"classifier"``.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    feature_based = True
    shared = ()
    batch_norm = "own"
    equal_features = True
    loss_names = ("cross_entropy", "alignment")

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        alignment: float,
        prediction: str,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("alignment (lambda)", alignment)
        check_choice("prediction", prediction, ("prototype", "classifier"))
        self.alignment, self.prediction = alignment, prediction
        if self.fine_tune == "head":
            self._check_head_predicts("fine_tune='head'", "fine_tune='all'")
        self.prototypes = ReceivedMeans(num_classes, self.feature_width)

    def check_personalization(self, personalization: Personalization) -> None:
        """Refuse one that trains the head alone where prototypes predict."""
        if personalization.train == "head":
            self._check_head_predicts("a personalization with train='head'", "train='all', or 'linear' for a new head")

    def _check_head_predicts(self, got: str, instead: str) -> None:
        if self.prediction == "prototype":
            raise ConfigurationError(
                f"{type(self).__name__} predicts by the nearest prototype, which a head does not change, got {got}: "
                f"use {instead}, or prediction='classifier'"
            )

    def exported_names(self) -> list[str]:
        """The model, without prototypes; a warning says so where it predicts by them."""
        if self.prediction == "prototype":
            warnings.warn(
                f"an exported client of {type(self).__name__} is its encoder and its head, and the federation predicts "
                'by the nearest prototype: its accuracies are not those of the file; prediction="classifier" evaluates '
                "the head",
                stacklevel=3,
            )
        return [name for name in super().exported_names() if not name.startswith("prototypes.")]

    def receive(self, broadcast: Broadcast) -> None:
        """Take over the global prototypes."""
        assert isinstance(broadcast, ClassMeansBroadcast)
        self.prototypes.assign(broadcast.means, broadcast.classes)

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Cross entropy and lambda times the squared distance to the prototype of the class (7), mean over d."""
        terms = super().loss_terms(features, labels)
        if self.uses("alignment"):
            distance = alignment_loss(features, labels, self.prototypes.means, self.prototypes.present)
            terms["alignment"] = self.alignment * distance
        return terms

    def make_update(self, context: FitContext, before: None) -> ClientUpdate:
        """The client's prototypes: class means at the trained encoder (3)."""
        return class_means_update(self, context)

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores, (N, C), see :meth:`class_scores`."""
        return self.class_scores(self.encoder(inputs))

    def class_scores(self, features: Tensor) -> Tensor:
        """Class scores, (N, C): of the head, or minus the distance to the prototypes (8).

        A class without a prototype is never predicted; before there are any prototypes, the head predicts.
        """
        scores = self.classify(features)
        if self.prediction == "classifier":
            return scores
        # In single precision at least: half-precision distances tie. Around the mean prototype: the product of matrices
        # by which distances are computed loses small ones far from the origin.
        prototypes, present = self.prototypes.means, self.prototypes.present
        precise = torch.promote_types(prototypes.dtype, torch.float32)
        prototypes = prototypes.to(precise)
        center = torch.where(present[:, None], prototypes, 0.0).sum(0) / present.sum().clamp(min=1)
        nearness = -torch.cdist(features.to(precise) - center, prototypes - center)
        # A class without a prototype comes after the farthest of the others.
        last = nearness.masked_fill(~present, torch.inf).amin(dim=1, keepdim=True) - 1
        nearness = torch.where(present, nearness, last)
        return torch.where(present.any(), nearness, scores.to(nearness))
