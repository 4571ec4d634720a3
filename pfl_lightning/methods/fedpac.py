"""FedPAC: feature alignment and classifier combination."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_at_least, check_learning_rate, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext, Phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional import (
    ClassStatistics,
    RunningAverage,
    alignment_loss,
    combination_weights,
    feature_variance,
    weighted_class_means,
)
from pfl_lightning.functional.tensor_lists import HOST, moved
from pfl_lightning.messages import Broadcast, ClientUpdate, statistics_field
from pfl_lightning.methods._class_means import ReceivedMeans, class_statistics
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import AggregationWeights, Aggregator, whole_or_not
from pfl_lightning.state.client_states import ClientStates
from pfl_lightning.state.tensors import TensorDict, select_state


@dataclass(frozen=True, kw_only=True)
class FedPACBroadcast(Broadcast):
    """The global encoder and centroids and, with ``combination``, the client's own combined head.

    Attributes:
        centroids: c_y, (C, d); ``None`` without alignment.
        present: Classes that have a global centroid, (C,), bool; none before the first aggregation.
    """

    centroids: Tensor | None = statistics_field(shape="C d", floating=True, when="alignment")
    present: Tensor | None = statistics_field(shape="C", dtype=torch.bool, when="alignment")


@dataclass(frozen=True, kw_only=True)
class FedPACUpdate(ClientUpdate):
    """The trained encoder and the centroids and, with ``combination``, the head and the statistics for it.

    Attributes:
        centroids: Class means at the trained encoder (17), (C, d); ``None`` without alignment.
        counts: n_kc, (C,); ``None`` without alignment.
        weighted_means: h_k, rows P_k(y) mu_ky at the received encoder, (C, d); ``None`` without combination.
        variance: V_k (44), a scalar; ``None`` without combination.
    """

    centroids: Tensor | None = statistics_field(shape="C d", floating=True, when="alignment", tells="class means")
    counts: Tensor | None = statistics_field(
        shape="C", dtype=torch.int64, at_least=0, total="num_samples", when="alignment", tells="class counts"
    )
    weighted_means: Tensor | None = statistics_field(
        shape="C d", floating=True, when="combination", tells="class means"
    )
    variance: Tensor | None = statistics_field(
        shape="", floating=True, at_least=0, when="combination", tells="feature variance"
    )


class FedPAC(FederatedClient):
    """Shared encoder, aligned to global class centroids; a head per client, combined from all heads of the cohort.

    Ablations (Table 2): ``combination=False`` is alignment only, ``alignment=0`` is combination only, both together
    leave FedRep's alternation.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        alignment: lambda, the weight of the alignment term (3); 0 leaves the alignment out.
        combination: Whether heads are combined by the server (4); otherwise they stay on the clients.
        head_epochs: Epochs of the head, before the encoder's ``epochs``.
        head_lr: Learning rate of the head's phase; ``None`` takes ``lr``, or a user's module's own.
        threshold: Combination weights below it are set to zero (published implementation: 1e-3; the paper has no cut).
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`; ``epochs`` is the encoder's.
    """

    citation = Citation(
        "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", "Xu et al.", "ICLR", 2023
    )
    feature_based = True
    batch_norm = "shared"
    paper_batch_size = 50
    averages_samples = True
    loss_names = ("cross_entropy", "alignment")
    personalization_losses = ("cross_entropy",)

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        alignment: float = 1.0,
        combination: bool = True,
        head_epochs: int = 1,
        head_lr: float | None = 0.1,
        threshold: float = 1e-3,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("alignment (lambda)", alignment)
        check_at_least("head_epochs", head_epochs, 0)
        check_learning_rate("head_lr", head_lr, optional=True)
        check_number("threshold", threshold)
        if threshold >= 1:
            raise ConfigurationError(
                f"threshold must be below 1, the sum of a client's combination weights, got {threshold}"
            )
        self.alignment, self.combination, self.threshold = alignment, combination, threshold
        self.head_epochs, self.head_lr = head_epochs, head_lr
        self.shared = ("encoder.*", "head.*") if combination else ("encoder.*",)
        self.centroids = ReceivedMeans(num_classes, self.feature_width)

    def receive(self, broadcast: FedPACBroadcast) -> None:
        """Take over the encoder, the combined head and the centroids."""
        super().receive(broadcast)
        if broadcast.centroids is not None and broadcast.present is not None:
            self.centroids.assign({"means": broadcast.centroids, "present": broadcast.present})

    def phases(self) -> tuple[Phase, ...]:
        """The head on the received encoder (15), then the encoder under the new head (16)."""
        return (
            Phase("head", ("head.*",), self.head_epochs, self.head_lr, losses=("cross_entropy",)),
            Phase("encoder", ("encoder.*",), self.epochs, losses=("cross_entropy", "alignment")),
        )

    def before_fit(self, context: FitContext) -> ClassStatistics:
        """Class statistics at the received encoder; they fill in for classes without a global centroid."""
        received = class_statistics(self, context)
        if self.alignment > 0:
            # Before the first aggregation there are no centroids at all, and no alignment.
            means, present = self.centroids.means, self.centroids.present
            held, own = moved([received.counts > 0, received.means.to(means.dtype)], means.device)
            filled, known = torch.where(present[:, None], means, own), present | held & present.any()
            self.centroids.assign({"means": filled, "present": known})
        return received

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Cross entropy and R_k (3), which includes lambda."""
        terms = super().loss_terms(features, labels)
        if self.alignment > 0 and self.uses("alignment"):
            distance = alignment_loss(features, labels, self.centroids.means, self.centroids.present)
            terms["alignment"] = self.alignment * distance
        return terms

    def make_update(self, context: FitContext, before: ClassStatistics) -> FedPACUpdate:
        """The trained shared part, centroids at the trained encoder (17), and statistics at the received one.

        Statistics stay on the host, where they are computed, checked and combined.
        """
        trained = class_statistics(self, context) if self.alignment > 0 else None
        dtype = self.statistics_like().dtype
        return FedPACUpdate(
            **vars(super().make_update(context, before)),
            centroids=trained.means.to(dtype) if trained else None,
            counts=trained.counts if trained else None,
            weighted_means=weighted_class_means(before).to(dtype) if self.combination else None,
            variance=feature_variance(before).to(dtype) if self.combination else None,
        )


class FedPACAggregator(Aggregator, of=FedPAC):
    """Averages encoders and centroids and, with ``combination``, combines a head for each client of the cohort.

    A client outside the cohort keeps its head. Heads are kept here rather than sent back at once: each is then sent
    once per participation, and the evaluation after the aggregation sees the combined heads.
    """

    update_class = FedPACUpdate

    def __init__(self, client: FedPAC, num_clients: int) -> None:
        super().__init__(client, num_clients)
        shared = select_state(client, client.shared_names())
        self.alignment, self.combination, self.threshold = client.alignment, client.combination, client.threshold
        # Whatever is shared and not `encoder.*` is the head of (4): batch normalization and further layers included.
        # Without combination there are none: what a user shares beside the encoder is averaged with it.
        averaged = client.match(shared, ("encoder.*",)) if client.combination else shared
        self.encoder = TensorDict({name: shared[name] for name in averaged})
        self.heads = ClientStates({n: v for n, v in shared.items() if n not in self.encoder.as_state()}, num_clients)
        classes, width = client.centroids.means.shape
        self.centroids: Tensor
        self.present: Tensor
        self.register_buffer("centroids", torch.zeros(classes, width))
        self.register_buffer("present", torch.zeros(classes, dtype=torch.bool))
        self._start_round()

    def _start_round(self) -> None:
        self.running_average = RunningAverage()
        self._centroid_sum = torch.zeros(self.centroids.shape, dtype=torch.float64)
        self._counts = torch.zeros(len(self.centroids), dtype=torch.float64)
        self._cohort: list[FedPACUpdate] = []  # heads and their statistics alone, not the encoders

    def broadcast(self, client: int, round: int) -> FedPACBroadcast:
        """The global encoder, this client's head, and the centroids."""
        return FedPACBroadcast(
            client=client,
            round=round,
            weights={**self.encoder.as_state(), **self.heads.get(client)},
            centroids=self.centroids if self.alignment > 0 else None,
            present=self.present if self.alignment > 0 else None,
        )

    def takes_mean(self) -> bool:
        """Return whether one update may stand for the mean of a cohort: without combined heads."""
        return not self.combination

    @whole_or_not
    def receive(self, update: FedPACUpdate) -> None:
        """Add one client's encoder and centroids to the sums and keep its head."""
        encoder = {name: update.weights[name] for name in self.encoder.as_state()}
        head = {name: update.weights[name] for name in self.heads.initial}
        counts = sums = None
        if update.centroids is not None and update.counts is not None:
            counts = update.counts.to("cpu", torch.float64)
            sums = counts[:, None] * update.centroids.to("cpu", torch.float64)
        self.running_average.update(encoder, update.num_samples)  # after all that may fail
        if sums is not None and counts is not None:
            self._centroid_sum += sums
            self._counts += counts
        if self.combination:
            self._cohort.append(replace(update, weights=head, centroids=None, counts=None))

    def aggregate(self) -> None:
        """Encoder (18), centroids (19), and the cohort's heads (4)."""
        if self.running_average.total_weight > 0:
            self.encoder.assign(self.running_average.result())  # (18)
        if self.alignment > 0 and bool(self._counts.any()):
            present = self._counts > 0
            mean = self._centroid_sum / self._counts.clamp(min=1)[:, None]  # (19)
            found = moved([mean.to(self.centroids.dtype), present], self.centroids.device)
            self.centroids.copy_(found[0])
            self.present.copy_(found[1])
        if self._cohort:
            self._combine_heads()
        self._start_round()

    def _combine_heads(self) -> None:
        cohort = self._cohort
        weights = combination_weights(
            torch.stack([cast(Tensor, update.weighted_means).cpu() for update in cohort]),
            torch.stack([cast(Tensor, update.variance).cpu() for update in cohort]),
            torch.tensor([update.num_samples for update in cohort]),
            threshold=self.threshold,
        )
        self.aggregation_weights = AggregationWeights(tuple(update.client for update in cohort), weights.cpu())
        combined, names = {}, list(self.heads.initial)
        heads = moved([update.weights[name] for name in names for update in cohort], HOST)  # at once
        for place, name in enumerate(names):
            own = torch.stack(heads[place * len(cohort) : (place + 1) * len(cohort)]).double()
            combined[name] = torch.einsum("ij,j...->i...", weights.double(), own)  # (4)
        for row, update in enumerate(cohort):
            self.heads.set(update.client, {name: rows[row] for name, rows in combined.items()})

    def has_client_weights(self) -> bool:
        """Return whether heads are combined."""
        return self.combination
