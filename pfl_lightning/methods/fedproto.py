"""FedProto: federated prototype learning."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional import alignment_loss
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.messages import ClientUpdate
from pfl_lightning.methods._class_means import ClassMeansBroadcast, ClassMeansUpdate, ReceivedMeans, class_means_update
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.phases import Personalization
from pfl_lightning.server import Aggregator


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
    averages_samples = True
    loss_names = ("cross_entropy", "alignment")
    not_exported = ("prototypes.*",)

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
                f"exported models of {type(self).__name__} predict with the head, but the federation by the nearest "
                "prototype: the reported accuracies are not those of the files. Set prediction='classifier' to "
                "evaluate the head",
                stacklevel=3,
            )
        return super().exported_names()

    def receive(self, broadcast: ClassMeansBroadcast) -> None:
        """Take over the global prototypes."""
        self.prototypes.take(broadcast.means, broadcast.classes)

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
        prototypes = at_least_single(prototypes)
        center = torch.where(present[:, None], prototypes, 0.0).sum(0) / present.sum().clamp(min=1)
        nearness = -torch.cdist(features.to(prototypes) - center, prototypes - center)
        # A class without a prototype comes after the farthest of the others.
        last = nearness.masked_fill(~present, torch.inf).amin(dim=1, keepdim=True) - 1
        nearness = torch.where(present, nearness, last)
        return torch.where(present.any(), nearness, scores.to(nearness))


class FedProto(PrototypeClient):
    """Only class prototypes are shared; features are pulled to the global prototype of their class.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; encoders may differ, their feature width may not.
        num_classes: Number of classes, C.
        alignment: lambda, the weight of the distance to the global prototypes (7).
        prediction: ``"prototype"`` predicts the class of the nearest global prototype (8), ``"classifier"`` by the
            client's own head. Both train in the same way.
        local_prototypes: Whether nothing is sent, and a client's features are pulled to the prototypes that its own
            last fit ended with, which take the place of the global ones.
        by_samples: Whether a client's prototypes count by its samples of the class; otherwise all count the same, as
            in the published code.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "FedProto: Federated Prototype Learning across Heterogeneous Clients", "Tan et al.", "AAAI", 2022
    )

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        alignment: float = 1.0,
        prediction: str = "prototype",
        local_prototypes: bool = False,
        by_samples: bool = True,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, alignment=alignment, prediction=prediction, **options)
        self.local_prototypes, self.by_samples = local_prototypes, by_samples
        if local_prototypes:
            self.prototypes = ReceivedMeans(num_classes, self.feature_width, persistent=True)  # personal

    def configure_aggregator(self, num_clients: int) -> Aggregator:
        """The server of FedProto; with local prototypes one that has nothing to do."""
        if self.local_prototypes:
            return FederatedClient.configure_aggregator(self, num_clients)
        return FedProtoAggregator(self, num_clients, self.by_samples)

    def receive(self, broadcast: Any) -> None:
        """Take over the global prototypes, if there are any."""
        if not self.local_prototypes:
            super().receive(broadcast)

    def make_update(self, context: FitContext, before: None) -> ClientUpdate:
        """The client's prototypes (3); local ones are kept, and nothing is sent."""
        update = class_means_update(self, context)
        if not self.local_prototypes:
            return update
        self.prototypes.take(update.means, update.classes)
        return FederatedClient.make_update(self, context, before)


class FedProtoAggregator(Aggregator):
    """Averages prototypes over the clients of the cohort that have the class, by default weighted by samples (6)."""

    update_class = ClassMeansUpdate

    def __init__(self, client: PrototypeClient, num_clients: int, by_samples: bool = True) -> None:
        super().__init__(client, num_clients)
        self.by_samples = by_samples
        classes, width = client.prototypes.means.shape
        self.prototypes: Tensor
        self.present: Tensor
        self.register_buffer("prototypes", torch.zeros(classes, width))
        self.register_buffer("present", torch.zeros(classes, dtype=torch.bool))
        self._start_round()

    def _start_round(self) -> None:
        self._sum = torch.zeros(self.prototypes.shape, dtype=torch.float64)
        self._counts = torch.zeros(len(self.prototypes), dtype=torch.float64)

    def broadcast(self, client: int, round: int) -> ClassMeansBroadcast:
        """The global prototypes, the same for every client."""
        classes = self.present.nonzero().flatten()
        return ClassMeansBroadcast(client=client, round=round, means=self.prototypes[classes], classes=classes)

    def takes_mean(self) -> bool:
        """Return whether one update may stand for the mean of a cohort, which it may."""
        return True

    def receive(self, update: ClassMeansUpdate) -> None:
        """Add a client's prototypes to the sums."""
        counts, classes = update.counts.to("cpu", torch.float64), update.classes.cpu()
        counts = counts if self.by_samples else torch.ones_like(counts)
        self._sum[classes] += counts[:, None] * update.means.to("cpu", torch.float64)
        self._counts[classes] += counts

    def aggregate(self) -> None:
        """The mean of each class (6); a class that no client of the cohort has keeps its prototype."""
        seen = self._counts > 0
        means = self._sum / self._counts.clamp(min=1)[:, None]
        self.prototypes[seen] = means[seen].to(self.prototypes)
        self.present |= seen.to(self.present.device)
        self._start_round()
