"""DC-PFL: dual calibration."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.errors import ClientError, ConfigurationError
from pfl_lightning.functional import ClassStatistics, alignment_loss, covariance_factors, sample_class_gaussians
from pfl_lightning.functional.gaussians import covariances_by_class
from pfl_lightning.messages import statistics_field
from pfl_lightning.methods._class_means import (
    ClassMeansBroadcast,
    ClassMeansUpdate,
    HeadAggregator,
    ReceivedMeans,
    class_statistics,
    spread,
)
from pfl_lightning.options import OptionsWithoutSGD, Unpack
from pfl_lightning.seeding import Purpose, seeded_generator


@dataclass(frozen=True, kw_only=True)
class DCPFLUpdate(ClassMeansUpdate):
    """Class means (6), counts, and covariances (7): as factors, or as full matrices.

    Attributes:
        factors: F_c with F_c^T F_c = Sigma_c, of min(n_kc - 1, d) rows at most each, below one another, (R, d);
            ``None`` without calibration or as matrices.
        ranks: Rows of each class among them, (K,), int64.
        covariances: Sigma_c, (K, d, d); ``None`` without calibration or as factors.
    """

    factors: Tensor | None = statistics_field(
        shape="R d", floating=True, when="uses_factors", tells="class covariances"
    )
    ranks: Tensor | None = statistics_field(
        shape="K", dtype=torch.int64, at_least=0, when="uses_factors", tells="class counts"
    )
    covariances: Tensor | None = statistics_field(
        shape="K d d", floating=True, covariance=True, when="uses_matrices", tells="class covariances"
    )


class DCPFL(FederatedClient):
    """Encoders stay; the head is trained on the server, from class means and from virtual features.

    Ablations (Table 1): ``alignment=0`` is "w/o AL", ``virtual_features=0`` is "w/o GC".

    Global means and covariances are those of the last cohort, as (10) and (11) sum over the clients of a round: a class
    that none of them holds has no mean, and so no alignment, in the next round.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; encoders may differ, their feature width may not.
        num_classes: Number of classes, C.
        alignment: lambda, the weight of the distance to the global class means (4); the paper gives no value. The
            gradient of a distance that is not squared has the same length however near the mean is: with 1, and many
            classes a client, all features can fall onto one point.
        virtual_features: sum_c |G_c|, drawn on the server in a round; 0 leaves the calibration (12) out.
        server_lr: Learning rate of the head on the server.
        calibration_epochs: Passes over the virtual features in a round; the paper gives none.
        calibration_batch_size: Virtual features in a step of (12); the paper gives none.
        factors: Whether covariances are uploaded as factors of rank at most n_kc - 1, which is never more than the
            full matrices, apart from 8 bytes a class for its rank.
        lr: Learning rate of the clients.
        momentum: Momentum of the clients; the paper names none.
        weight_decay: Weight decay of the clients; the paper names none.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`. ``eval_model`` is ``"trained"``,
            as for :class:`~pfl_lightning.methods.FedGH`.
    """

    citation = Citation("Dual Calibration-based Personalised Federated Learning", "Tang et al.", "IJCAI", 2024)
    feature_based = True
    scores_features = True
    shared = ("head.*",)
    batch_norm = "own"
    eval_model = "trained"
    averages_samples = True
    loss_names = ("cross_entropy", "alignment")

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        alignment: float = 0.1,
        virtual_features: int = 1000,
        server_lr: float = 0.01,
        calibration_epochs: int = 1,
        calibration_batch_size: int = 32,
        factors: bool = True,
        lr: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **options: Unpack[OptionsWithoutSGD],
    ) -> None:
        super().__init__(encoder, num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay, **options)
        check_number("alignment (lambda)", alignment)
        check_number("server_lr", server_lr, strict=True)
        check_at_least("virtual_features", virtual_features, 0)
        check_at_least("calibration_epochs", calibration_epochs, 1)
        check_at_least("calibration_batch_size", calibration_batch_size, 1)
        if 0 < virtual_features < num_classes:
            raise ConfigurationError(
                f"virtual_features must be 0 or at least one for each class ({num_classes}), got {virtual_features}"
            )
        self.alignment, self.virtual_features, self.server_lr = alignment, virtual_features, server_lr
        self.calibration_epochs, self.calibration_batch_size = calibration_epochs, calibration_batch_size
        self.factors = factors
        self.received = ReceivedMeans(num_classes, self.feature_width)

    def receive(self, broadcast: ClassMeansBroadcast) -> None:
        """Replace the head by the global one; take over the global class means."""
        super().receive(broadcast)
        self.received.take(broadcast.means, broadcast.classes)

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Cross entropy and lambda ||f(x) - mu_y||_2, mean over the batch (3, 4)."""
        terms = super().loss_terms(features, labels)
        if self.alignment > 0 and self.uses("alignment"):
            distance = alignment_loss(features, labels, self.received.means, self.received.present, norm="l2")
            terms["alignment"] = self.alignment * distance
        return terms

    def make_update(self, context: FitContext, before: None) -> DCPFLUpdate:
        """Class means (6), counts and covariances (7) at the trained encoder.

        Raises:
            ClientError: The features are not finite, or a covariance could not be decomposed.
        """
        calibrated, like = self.virtual_features > 0, self.statistics_like()
        statistics = class_statistics(self, context, with_covariances=calibrated)
        classes = statistics.counts.nonzero().flatten()
        rows = ranks = matrices = None
        if calibrated and self.factors:
            try:
                rows, ranks = covariance_factors(statistics)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # torch exports it in passing
                raise ClientError(
                    context.client,
                    context.round,
                    f"a class covariance of its features could not be decomposed ({error}); look for features that are "
                    "very large or nearly the same, lower the learning rate, or upload matrices (factors=False)",
                ) from error
            rows, ranks = rows.to(like.dtype), ranks[classes]
        elif calibrated:
            width = statistics.num_features
            matrices = torch.zeros(len(classes), width, width, dtype=like.dtype)
            places = {y: place for place, y in enumerate(classes.tolist())}
            for y, covariance in statistics.covariances_by_class().items():
                matrices[places[y]] = covariance
        return DCPFLUpdate(
            **context.sender,
            classes=classes,
            means=statistics.means[classes].to(like.dtype),
            counts=statistics.counts[classes],
            factors=rows,
            ranks=ranks,
            covariances=matrices,
        ).to(like.device)


class DCPFLAggregator(HeadAggregator, of=DCPFL):
    """Trains the head on class means, pools the clients' statistics, and fine-tunes the head on virtual features."""

    update_class = DCPFLUpdate

    def __init__(self, client: DCPFL, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.virtual_features = client.virtual_features
        self.epochs, self.batch_size = client.calibration_epochs, client.calibration_batch_size
        self.uses_factors = self.virtual_features > 0 and client.factors
        self.uses_matrices = self.virtual_features > 0 and not client.factors
        self.means: Tensor
        self.present: Tensor
        self.register_buffer("means", torch.zeros_like(client.received.means))
        self.register_buffer("present", torch.zeros_like(client.received.present))
        self._pooled = self._empty_pool()

    def _empty_pool(self) -> ClassStatistics:
        classes, width = self.means.shape
        return ClassStatistics(classes, width, with_covariances=self.virtual_features > 0)

    def broadcast(self, client: int, round: int) -> ClassMeansBroadcast:
        """The global head and class means, the same for every client."""
        weights, classes = self.head_weights(), self.present.nonzero().flatten()
        means = self.means[classes]
        return ClassMeansBroadcast(client=client, round=round, weights=weights, means=means, classes=classes)

    def receive(self, update: DCPFLUpdate) -> None:
        """One step of the head on the client's class means (8, 9); the statistics join the pool (10, 11)."""
        statistics = self._statistics_of(update)
        super().receive(update)
        self.descend(update.means, update.classes)  # (8), (9)
        self._pooled.merge(statistics)  # (10), (11)

    def _statistics_of(self, update: DCPFLUpdate) -> ClassStatistics:
        """The client's class statistics on the CPU; the cost is that of the classes it has.

        Raises:
            InvalidMessageError: No features have such statistics.
        """
        classes, width = self.means.shape
        counts = spread(update.counts, update.classes, classes).cpu()
        means = spread(update.means, update.classes, classes).to("cpu", torch.float64)
        try:
            if update.factors is not None and update.ranks is not None:
                ranks = spread(update.ranks, update.classes, classes).cpu()
                covariances = covariances_by_class(update.factors.cpu(), ranks, width)
            elif update.covariances is not None:
                covariances = dict(zip(update.classes.tolist(), update.covariances.cpu(), strict=True))
            else:
                return ClassStatistics.from_moments(counts, means, square_deviations=torch.zeros(classes))
            return ClassStatistics.from_moments(counts, means, covariances)
        except ValueError as error:
            update.refuse(str(error))

    def aggregate(self) -> None:
        """Take over the head, after its calibration on virtual features (12), and the pooled class means (10)."""
        if self._next:
            self.means.copy_(self._pooled.means)
            self.present.copy_(self._pooled.counts > 0)
            if self.virtual_features > 0:
                self._calibrate()
        super().aggregate()
        self._pooled = self._empty_pool()

    def _calibrate(self) -> None:
        generator = seeded_generator(self.seed, Purpose.VIRTUAL_FEATURES, self._round)
        try:
            features, labels = sample_class_gaussians(self._pooled, self.virtual_features, generator)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # torch exports it in passing
            warnings.warn(
                f"round {self._round + 1}: the head is not calibrated on virtual features, as a pooled "
                f"class covariance could not be decomposed ({error}); look for clients whose class statistics are very "
                "large",
                stacklevel=3,
            )
            return
        for _ in range(self.epochs):
            for batch in torch.randperm(len(labels), generator=generator).to(labels.device).split(self.batch_size):
                self.descend(features[batch], labels[batch])  # (12)
