"""SphereFed: hyperspherical federated learning, and its calibration of the classifier."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least
from pfl_lightning.client import Citation, FederatedClient, FitContext, Phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.messages import Broadcast, ClientUpdate, statistics_field, weight_field
from pfl_lightning.methods._class_means import finite_features
from pfl_lightning.options import OptionsWithoutSGD, Unpack
from pfl_lightning.server import AveragingAggregator


@dataclass(frozen=True, kw_only=True)
class SphereFedBroadcast(Broadcast):
    """The global encoder and, once there is one, the calibrated classifier.

    Attributes:
        head: The calibrated classifier, (C, w); ``None`` for the fixed one, which everybody has.
    """

    head: Tensor | None = weight_field(shape="C w", floating=True, default=None)


@dataclass(frozen=True, kw_only=True)
class SphereFedUpdate(ClientUpdate):
    """The trained encoder or, in the round of the calibration, the client's statistics and no weights.

    Attributes:
        gram: V_k, the sum of z z^T over the client's samples, (w, w).
        products: U_k, the sum of z onehot(y)^T, (w, C).
    """

    gram: Tensor | None = statistics_field(
        shape="w w", floating=True, covariance=True, default=None, tells="feature products"
    )
    products: Tensor | None = statistics_field(shape="w C", floating=True, default=None, tells="class sums")


class SphereFed(FederatedClient):
    """Features of unit length are trained towards a fixed orthonormal classifier, and the encoder is averaged.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C; features need at least this width.
        projection: Width of a linear layer behind the encoder, which trains and travels with it: for encoders with
            fewer features than classes. ``None`` has none, as in the paper.
        calibrate: Whether the last of the planned rounds calibrates the classifier in closed form, and trains nothing.
        lr: Learning rate: about ten times that of a method with cross entropy, whose gradient is larger.
        momentum: Momentum of the local SGD.
        weight_decay: Weight decay of the local SGD.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation("SphereFed: Hyperspherical Federated Learning", "Dong et al.", "ECCV", 2022)
    batch_norm = "shared"
    shared: tuple[str, ...] = ("encoder.*",)
    fixed = ("head.*",)
    averages_samples = True
    loss_names = ("squared_error",)

    calibrating: Tensor
    frame: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        projection: int | None = None,
        calibrate: bool = False,
        lr: float = 0.1,
        momentum: float = 0.5,
        weight_decay: float = 5e-4,
        **options: Unpack[OptionsWithoutSGD],
    ) -> None:
        check_at_least("projection", projection, 1, optional=True)
        self._width = projection
        super().__init__(encoder, num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay, **options)
        if calibrate and self.eval_model == "trained":
            raise ConfigurationError(
                'calibrate=True needs eval_model="aggregated": a calibrated classifier belongs to the averaged encoder'
            )
        self.calibrate = calibrate
        self.shared = ("encoder.*",) if projection is None else ("encoder.*", "projection.*")
        self.register_buffer("calibrating", torch.zeros((), dtype=torch.bool), persistent=False)
        self.register_buffer("frame", self.head.weight.detach().clone(), persistent=False)

    def assemble(self, encoder: nn.Module) -> None:
        """The encoder, and a head of orthonormal rows: Q^T of the QR decomposition of a Gaussian matrix."""
        features = int(encoder.out_features)  # type: ignore[arg-type]
        width = features if self._width is None else self._width
        if width < self.num_classes:
            raise ConfigurationError(
                f"SphereFed needs at least as many features as classes for an orthonormal classifier, got {width} "
                f"features and {self.num_classes} classes: use a wider encoder, or set projection={self.num_classes}"
            )
        self.encoder = encoder
        self.projection = nn.Identity() if self._width is None else nn.Linear(features, width)
        self.head = nn.Linear(width, self.num_classes, bias=False)
        orthonormal, _ = torch.linalg.qr(torch.randn(width, self.num_classes))
        with torch.no_grad():
            self.head.weight.copy_(orthonormal.T)

    @torch.no_grad()
    def receive(self, broadcast: SphereFedBroadcast) -> None:
        """Take over the encoder and, in an evaluation after a calibration, its classifier in place of the fixed one."""
        super().receive(broadcast)
        if broadcast.head is not None:
            self.head.weight.copy_(broadcast.head)

    def before_fit(self, context: FitContext) -> tuple[Tensor, Tensor] | None:
        """In the round of the calibration V_k and U_k, at the encoder that was received.

        Training is under the fixed classifier, also where an earlier fit has calibrated another.
        """
        if not self.calibrate:
            return None
        with torch.no_grad():
            self.head.weight.copy_(self.frame)
        rounds = context.facts.num_rounds
        if rounds is None:
            raise ConfigurationError(
                "calibrate=True needs a planned number of rounds, the last of which calibrates: "
                "set the Trainer's max_epochs"
            )
        self.calibrating.fill_(context.round == rounds - 1)
        if context.round != rounds - 1:
            return None
        features, labels = finite_features(self, context)
        with torch.no_grad():
            unit = self.head_input(features.to(self.statistics_like())).to("cpu", torch.float64)  # z
        onehot = F.one_hot(labels.cpu(), self.num_classes).to(unit)
        return unit.T @ unit, unit.T @ onehot  # V_k, U_k

    def phases(self) -> tuple[Phase, ...]:
        """The encoder alone; nothing in the round of the calibration."""
        return () if bool(self.calibrating) else (Phase("encoder", self.shared, self.epochs),)

    def head_input(self, features: Tensor) -> Tensor:
        """Points z of the unit sphere, (N, w)."""
        return F.normalize(self.projection(features), dim=-1)

    def classify(self, features: Tensor) -> Tensor:
        """W z, the cosines to the classes' directions, (N, C)."""
        scores: Tensor = self.head(self.head_input(features))
        return scores

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Mean over samples and classes of (W z - onehot(y))^2."""
        if not self.uses("squared_error"):
            return {}
        scores = self.classify(features)
        onehot = F.one_hot(labels.long(), self.num_classes).to(scores.dtype)
        return {"squared_error": F.mse_loss(scores, onehot)}

    def make_update(self, context: FitContext, before: tuple[Tensor, Tensor] | None) -> SphereFedUpdate:
        """The trained encoder; of a calibration V_k and U_k alone."""
        update = SphereFedUpdate(**vars(super().make_update(context, None)))
        if before is None:
            return update
        # In half precision the server could not tell small eigenvalues from rounding, and would drop most of them.
        like = at_least_single(self.statistics_like())
        gram, products = (statistics.to(like) for statistics in before)
        return replace(update, weights={}, gram=gram, products=products)


class SphereFedAggregator(AveragingAggregator, of=SphereFed):
    """Averages encoders, weighted by samples; in the last round solves for the classifier."""

    update_class = SphereFedUpdate
    averages = True

    head: Tensor
    calibrated: Tensor

    def __init__(self, client: SphereFed, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self._encoder = dict(self.expected_weights)
        self.register_buffer("head", client.head.weight.detach().clone())
        self.register_buffer("calibrated", torch.full((), -1, dtype=torch.int64))  # last round that calibrated
        self._start_round()

    def _start_round(self) -> None:
        width, classes = self.head.shape[1], self.head.shape[0]
        self._gram = torch.zeros(width, width, dtype=torch.float64)
        self._products = torch.zeros(width, classes, dtype=torch.float64)
        self._round, self._rounding = -1, 0.0

    def broadcast(self, client: int, round: int) -> SphereFedBroadcast:
        """The encoder; in evaluations after a calibration its classifier, too. Training goes on under the fixed one."""
        head = self.head if round <= int(self.calibrated) else None
        return SphereFedBroadcast(**vars(super().broadcast(client, round)), head=head)

    def check(self, update: ClientUpdate) -> None:
        """As :meth:`~pfl_lightning.server.Aggregator.check`; the statistics of a calibration come without weights."""
        calibrates = isinstance(update, SphereFedUpdate) and update.gram is not None and update.products is not None
        self.expected_weights = {} if calibrates else self._encoder
        super().check(update)

    def receive(self, update: SphereFedUpdate) -> None:
        """Add a client's encoder to the average, or V_k and U_k to their sums."""
        if update.gram is None or update.products is None:
            super().receive(update)
            return
        self._gram += update.gram.to("cpu", torch.float64)
        self._products += update.products.to("cpu", torch.float64)
        self._round, self._rounding = update.round, torch.finfo(update.gram.dtype).eps

    def aggregate(self) -> None:
        """The mean encoder; or the classifier of least norm that solves V W^T = U, the least squares of all samples."""
        if self._round >= 0:
            # What rounding made of a zero eigenvalue is not inverted.
            inverse = torch.linalg.pinv(self._gram, rtol=len(self._gram) * self._rounding, hermitian=True)
            self.head.copy_((inverse @ self._products).T)
            self.calibrated.fill_(self._round)
        elif self.running_average.total_weight > 0:  # of an encoder that is no more
            self.calibrated.fill_(-1)
        self._start_round()
        super().aggregate()
