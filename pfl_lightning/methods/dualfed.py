"""DualFed: hierarchical representations, general before the projector and personal after it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient, Phase
from pfl_lightning.encoders.mlp import make_projector
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional import supervised_contrastive_loss
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.options import OptionsWithoutFit, Unpack

PARTS = ("encoder", "projector", "head", "global_head")


class DualFed(FederatedClient):
    """A global classifier on the encoder's features z, and a personal one on their projection u.

    ``head`` is the personal classifier, ``global_head`` the global one.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        contrastive: lambda, the weight of the supervised contrastive loss of u (8): 40 for PACS and DomainNet, 2 for
            Office-Home.
        temperature: tau of that loss: 0.2, or 0.05 for Office-Home.
        stages: ``"stage-wise"`` trains the personal side and then the global classifier (8, 10); ``"simultaneous"``
            everything together ("Simu.", Table 4).
        stage2_mode: ``"evaluation"`` lets encoder and projector normalize by their running statistics in stage 2, in
            which they do not train; ``"training"`` by each batch, so that running statistics move twice a round
            (the published implementation). Not with ``stages="simultaneous"``, which has no stage 2.
        prediction: ``"probabilities"`` adds both classifiers' normalized outputs (5), ``"logits"`` their scores (the
            published implementation).
        projector_depth: Linear layers of the projector, D (Table 5).
        projector_hidden: Width of its hidden layers, H (Table 5).
        projector_batch_norm: Whether each of them is followed by batch normalization (Table 5).
        personal: Parts that stay on the client: any of ``"encoder"``, ``"projector"``, ``"head"``,
            ``"global_head"`` (Table 7).
        global_on: ``"encoder"``, or ``"projector"`` for a global classifier behind the projector: DualFed-P with a
            personal projector, DualFed-G with a shared one, ``personal=("head",)`` (Table 6).
        lr: Learning rate.
        momentum: Momentum of the local SGD.
        weight_decay: Weight decay; the paper names none.
        epochs: Local epochs of each stage, E.
        optimizer: Makes the optimizer from the trainable parameters, in place of SGD.
        lr_scheduler: Makes a scheduler from the optimizer, stepped after every local epoch of a phase.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "DualFed: Enjoying both Generalization and Personalization in Federated Learning via Hierachical "
        "Representations",
        "Zhu et al.",
        "ACM MM",
        2024,
    )
    feature_based = True
    scores_features = True
    shared: tuple[str, ...] = ("encoder.*", "global_head.*")
    batch_norm = "own_statistics"
    by_samples = False  # (11)
    heads = ("head.*", "global_head.*")
    loss_names = ("cross_entropy", "contrastive", "global_cross_entropy")
    paper_batch_size = 256

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        contrastive: float = 40.0,
        temperature: float = 0.2,
        stages: str = "stage-wise",
        stage2_mode: str = "evaluation",
        prediction: str = "probabilities",
        projector_depth: int = 2,
        projector_hidden: int = 256,
        projector_batch_norm: bool = True,
        personal: Sequence[str] = ("projector", "head"),
        global_on: str = "encoder",
        lr: float = 0.01,
        momentum: float = 0.5,
        weight_decay: float = 0.0,
        epochs: int = 1,
        **options: Unpack[OptionsWithoutFit],
    ) -> None:
        super().__init__(
            encoder, num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay, epochs=epochs, **options
        )
        check_number("contrastive (lambda)", contrastive)
        check_number("temperature (tau)", temperature, strict=True)
        check_at_least("projector_depth", projector_depth, 1)
        check_at_least("projector_hidden", projector_hidden, 1)
        check_choice("stages", stages, ("stage-wise", "simultaneous"))
        check_choice("stage2_mode", stage2_mode, ("evaluation", "training"))
        if stage2_mode == "training" and stages == "simultaneous":
            raise ConfigurationError(
                'stage2_mode="training" is about stage 2, which stages="simultaneous" does not have: leave one of them '
                "out"
            )
        check_choice("prediction", prediction, ("probabilities", "logits"))
        check_choice("global_on", global_on, ("encoder", "projector"))
        for part in personal:
            check_choice("personal", part, PARTS)
        self.contrastive, self.temperature, self.stages = contrastive, temperature, stages
        self.stage2_mode = stage2_mode
        self.prediction, self.global_on = prediction, global_on
        width = self.feature_width
        self.projector = make_projector(width, projector_hidden, projector_depth, projector_batch_norm)
        self.global_head = nn.Linear(width, num_classes)
        self.shared = tuple(f"{part}.*" for part in PARTS if part not in personal)

    def remedies(self) -> tuple[str, ...]:
        """A smaller lambda."""
        if self.contrastive <= 2:
            return ()
        return (f"contrastive=2 (the paper's for Office-Home) instead of {self.contrastive:g}",)

    def phases(self) -> tuple[Phase, ...]:
        """Stage 1 with the global classifier frozen (8), stage 2 with everything else frozen (10); or both at once."""
        if self.stages == "simultaneous":
            return (Phase("simultaneous", epochs=self.epochs),)
        return (
            Phase(
                "personal",
                ("encoder.*", "projector.*", "head.*"),
                self.epochs,
                losses=("cross_entropy", "contrastive"),
            ),
            Phase(
                "global",
                ("global_head.*",),
                self.epochs,
                losses=("global_cross_entropy",),
                batch_statistics=self.stage2_mode == "training",
            ),
        )

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """CE of the personal classifier and lambda SupCon(u) (6, 7) in stage 1, CE of the global one (9) in stage 2."""
        terms = {}
        personal, contrastive = self.uses("cross_entropy"), self.contrastive > 0 and self.uses("contrastive")
        behind = personal or contrastive or self.global_on == "projector" or self.phase.batch_statistics
        projected = self.head_input(features) if behind else features  # u
        if personal:
            terms["cross_entropy"] = self.head_cross_entropy(projected, labels)  # (6)
        if contrastive:
            contrast = supervised_contrastive_loss(projected, labels, self.temperature)  # (7)
            terms["contrastive"] = self.contrastive * contrast
        if self.uses("global_cross_entropy"):
            scores = self.global_head(projected if self.global_on == "projector" else features)
            terms["global_cross_entropy"] = F.cross_entropy(scores, labels)  # (9)
        return terms

    def head_input(self, features: Tensor) -> Tensor:
        """The projection u of the features."""
        projected: Tensor = self.projector(features)
        return projected

    def classify(self, features: Tensor) -> Tensor:
        """Scores (N, C) of both classifiers together (5); as logarithms of the mean probability, or as the sum."""
        projected = self.head_input(features)
        personal = self.head(projected)
        general = self.global_head(features if self.global_on == "encoder" else projected)
        if self.prediction == "logits":
            scores: Tensor = personal + general
            return scores
        both = torch.stack([at_least_single(scores).log_softmax(dim=-1) for scores in (personal, general)])
        return both.logsumexp(dim=0) - math.log(2)

    def representations(self, features: Tensor) -> dict[str, Tensor]:
        """The general representation z in front of the projector, and the personal one u behind it."""
        return {"pre_projection": features, "post_projection": self.projector(features)}
