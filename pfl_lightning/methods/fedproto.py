"""FedProto: federated prototype learning."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.functional import alignment_loss
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.methods._class_means import (
    ClassMeansBroadcast,
    ClassMeansUpdate,
    ReceivedMeans,
    class_means_update,
)
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import Aggregator


class FedProto(FederatedClient):
    """Only class prototypes are shared; features are pulled to the global prototype of their class.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; encoders may differ, their feature width may not.
        num_classes: Number of classes, C.
        alignment: lambda, the weight of the distance to the global prototypes (7).
        prediction: ``"prototype"`` predicts the class of the nearest global prototype (8), ``"classifier"`` by the
            client's own head. Both train in the same way.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "FedProto: Federated Prototype Learning across Heterogeneous Clients", "Tan et al.", "AAAI", 2022
    )
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
        alignment: float = 1.0,
        prediction: str = "prototype",
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("alignment (lambda)", alignment)
        check_choice("prediction", prediction, ("prototype", "classifier"))
        self.alignment, self.prediction = alignment, prediction
        self.prototypes = ReceivedMeans(num_classes, self.feature_width)

    def configure_aggregator(self, num_clients: int) -> FedProtoAggregator:
        """The server of FedProto."""
        return FedProtoAggregator(self, num_clients)

    def receive(self, broadcast: Broadcast) -> None:
        """Take over the global prototypes."""
        assert isinstance(broadcast, ClassMeansBroadcast)
        self.prototypes.assign(broadcast.means, broadcast.classes)

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Cross entropy and lambda times the squared distance to the prototype of the class, mean over d (7)."""
        terms = super().loss_terms(features, labels)
        if self.uses("alignment"):
            distance = alignment_loss(features, labels, self.prototypes.means, self.prototypes.present)
            terms["alignment"] = self.alignment * distance
        return terms

    def make_update(self, context: FitContext, before: None) -> ClassMeansUpdate:
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
        # In single precision at least: half-precision distances tie.
        prototypes, present = self.prototypes.means, self.prototypes.present
        precise = torch.promote_types(prototypes.dtype, torch.float32)
        nearness = -torch.cdist(features.to(precise), prototypes.to(precise))
        # A class without a prototype comes after the farthest of the others.
        last = nearness.masked_fill(~present, torch.inf).amin(dim=1, keepdim=True) - 1
        nearness = torch.where(present, nearness, last)
        return torch.where(present.any(), nearness, scores.to(nearness))


class FedProtoAggregator(Aggregator):
    """Averages prototypes over the clients of the cohort that have the class, weighted by samples (6)."""

    update_class = ClassMeansUpdate

    def __init__(self, client: FedProto, num_clients: int) -> None:
        super().__init__(client, num_clients)
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

    def receive(self, update: ClientUpdate) -> None:
        """Add a client's prototypes to the sums."""
        assert isinstance(update, ClassMeansUpdate)
        counts, classes = update.counts.to("cpu", torch.float64), update.classes.cpu()
        self._sum[classes] += counts[:, None] * update.means.to("cpu", torch.float64)
        self._counts[classes] += counts

    def aggregate(self) -> None:
        """The mean of each class (6); a class that no client of the cohort has keeps its prototype."""
        seen = self._counts > 0
        means = self._sum / self._counts.clamp(min=1)[:, None]
        self.prototypes[seen] = means[seen].to(self.prototypes)
        self.present |= seen.to(self.present.device)
        self._start_round()
