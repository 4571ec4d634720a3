"""FedETF: a fixed classifier that is a simplex equiangular tight frame."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext, Phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional import balanced_softmax_loss
from pfl_lightning.options import OptionsWithoutSGD, Unpack
from pfl_lightning.server import AveragingAggregator


class FedETF(FederatedClient):
    """Projected features of unit length are trained towards fixed directions, as far apart as directions can be.

    The scores are beta z M: z the unit vector of the projected features, M the frame, beta a scale that is learned.
    Before an evaluation a client fits the whole model once more, and then adapts M and the projection in turn.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        width: Width of the projection, of at least C; ``None`` takes C (published residual networks; 64 in its CNN).
        scale: First value of beta (published residual networks: 1; its CNN: 10).
        floor: Least count of a class in the balanced softmax: with 1 a class that a client lacks counts as one sample
            (published implementation), with 0 it is left out.
        alternations: How many times a client adapts M, and then the projection, before it is evaluated; 0 evaluates the
            global model, as ``fine_tune`` says, which needs it.
        alternation_epochs: Epochs of each of these adaptations.
        alternation_mode: ``"evaluation"`` lets the encoder, which does not train in them, normalize by its running
            statistics, ``"training"`` by each batch (published implementation).
        frame_lr: Learning rate of M, without momentum and weight decay.
        projection_lr: Learning rate of the projection in the adaptations, with ``momentum`` and ``weight_decay``.
        lr: Learning rate.
        momentum: Momentum of the local SGD.
        weight_decay: Weight decay of the local SGD.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and Fixed Classifier",
        "Li et al.",
        "ICCV",
        2023,
    )
    shared = ("encoder.*", "projection.*", "scale")
    fixed = ("head.*",)
    batch_norm = "shared"
    paper_batch_size = 128
    averages_samples = True
    loss_names = ("balanced_softmax",)
    personalization_losses = ("cross_entropy",)

    class_counts: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        width: int | None = None,
        scale: float = 1.0,
        floor: float = 1.0,
        alternations: int = 20,
        alternation_epochs: int = 3,
        alternation_mode: str = "evaluation",
        frame_lr: float = 0.1,
        projection_lr: float = 0.05,
        lr: float = 0.04,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        **options: Unpack[OptionsWithoutSGD],
    ) -> None:
        check_at_least("num_classes", num_classes, 2)
        self._width = num_classes if width is None else width
        check_at_least("width", self._width, 1)
        if self._width < num_classes:
            raise ConfigurationError(
                "FedETF needs at least two classes, and a width of at least the number of classes, "
                f"got width {self._width} and {num_classes} classes: leave width out, or raise it"
            )
        super().__init__(encoder, num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay, **options)
        check_number("scale (beta)", scale, strict=True)
        check_number("floor", floor)
        check_at_least("alternations", alternations, 0)
        check_at_least("alternation_epochs", alternation_epochs, 1)
        check_choice("alternation_mode", alternation_mode, ("evaluation", "training"))
        if self.fine_tune is not None and alternations > 0:
            raise ConfigurationError(
                f"FedETF adapts its model by alternations (alternations={alternations}) or by fine_tune "
                f"({self.fine_tune!r}): give fine_tune together with alternations=0, or leave it out"
            )
        check_number("frame_lr", frame_lr)
        check_number("projection_lr", projection_lr)
        self.floor, self.alternations, self.alternation_epochs = floor, alternations, alternation_epochs
        self.alternation_mode = alternation_mode
        self.scale = nn.Parameter(torch.tensor(float(scale)))  # beta
        self.register_buffer("class_counts", torch.zeros(num_classes), persistent=False)  # n_kc
        # Made once: phases of equal optimizers are equal, so that clients can be trained together.
        self._frame_sgd = partial(torch.optim.SGD, lr=frame_lr)
        self._projection_sgd = partial(torch.optim.SGD, lr=projection_lr, momentum=momentum, weight_decay=weight_decay)

    def assemble(self, encoder: nn.Module) -> None:
        """The encoder, the projection, and the frame M = sqrt(C / (C - 1)) U (I - 1 1^T / C) with U orthonormal."""
        classes, width = self.num_classes, self._width
        self.encoder = encoder
        self.projection = nn.Linear(encoder.out_features, width)  # type: ignore[arg-type]
        self.head = nn.Linear(width, classes, bias=False)  # M^T
        orthonormal, _ = torch.linalg.qr(torch.randn(width, classes))
        frame = math.sqrt(classes / (classes - 1)) * (orthonormal @ (torch.eye(classes) - 1 / classes))
        with torch.no_grad():
            self.head.weight.copy_(frame.T)

    def before_fit(self, context: FitContext) -> None:
        """The client's own class counts, for the balanced loss."""
        self.class_counts.copy_(self.count_classes(context))

    def before_evaluation(self, context: FitContext) -> None:
        """The same for the local fit before an evaluation."""
        self.class_counts = self.count_classes(context).to(self.class_counts)

    def phases(self) -> tuple[Phase, ...]:
        """Encoder, projection and beta."""
        return (Phase("fit", self.shared, self.epochs),)

    def personalization_phases(self) -> tuple[Phase, ...]:
        """One more local fit; then the frame and the projection in turn, by the plain cross entropy.

        What ``pfl personalize`` asks for takes their place.
        """
        given = super().personalization_phases()
        if given or self.alternations == 0:
            return given
        adapt = partial(
            Phase,
            epochs=self.alternation_epochs,
            losses=("cross_entropy",),
            batch_statistics=self.alternation_mode == "training",
        )
        turn = (
            adapt("frame", ("head.*",), optimizer=self._frame_sgd),
            adapt("projection", ("projection.*",), optimizer=self._projection_sgd),
        )
        return (Phase("fit", self.shared, self.epochs, losses=("balanced_softmax",)), *turn * self.alternations)

    def head_input(self, features: Tensor) -> Tensor:
        """Unit vectors z of the projected features, (N, width)."""
        return F.normalize(self.projection(features), dim=-1)

    def classify(self, features: Tensor) -> Tensor:
        """Scores beta z M, (N, C)."""
        scores: Tensor = self.scale * self.head(self.head_input(features))
        return scores

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Balanced softmax of the scores, or in the adaptations their cross entropy."""
        terms = super().loss_terms(features, labels)
        if self.uses("balanced_softmax"):
            counts = self.class_counts.clamp(min=self.floor)
            terms["balanced_softmax"] = balanced_softmax_loss(self.classify(features), labels, counts)
        return terms


class FedETFAggregator(AveragingAggregator, of=FedETF):
    """Mean of the clients' models, weighted by samples, whose beta is logged with the round (``server/beta``)."""

    averages = True

    def aggregate(self) -> None:
        """Take the mean."""
        super().aggregate()
        self.metrics = {"server/beta": float(self.weights.as_state()["scale"])}
