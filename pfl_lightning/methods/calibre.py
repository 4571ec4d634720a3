"""Calibre: self-supervised federated training, calibrated by prototypes of clusters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_choice, check_number
from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional import divergence_rate, kmeans, prototype_contrastive_loss, prototype_meta_loss
from pfl_lightning.functional.clustering import num_candidates
from pfl_lightning.messages import ClientUpdate, State, statistics_field
from pfl_lightning.methods._class_means import check_finite
from pfl_lightning.methods._self_supervised import SelfSupervisedOptions
from pfl_lightning.methods.pfl_ssl import PFLSSL
from pfl_lightning.options import Unpack
from pfl_lightning.self_supervised import ObjectiveOutput
from pfl_lightning.self_supervised.objective import features_of
from pfl_lightning.server import AveragingAggregator

STARTS = 4
"""Starts of the k-means on a batch."""

COLLAPSED = torch.finfo(torch.float32).tiny
"""A divergence rate below this counts as zero."""


@dataclass(frozen=True, kw_only=True)
class CalibreUpdate(ClientUpdate):
    """The client's shared state, and how far its encodings lie from the centroids of their clusters.

    Attributes:
        divergence: The divergence rate, a scalar: a mean distance.
    """

    divergence: Tensor = statistics_field(shape="", floating=True, at_least=0, tells="quality of fit")


class Calibre(PFLSSL):
    """A self-supervised objective with two regularizers on prototypes of clusters; better clusters weigh more.

    The stage "train": Algorithm 1 on the clients, then an average with weights by the divergence rates. The head is
    each client's own and does not train in this stage.

    Ablations: ``alpha_n=0`` leaves out L_n, ``alpha_p=0`` L_p (Table I); ``aggregation="samples"``, which the paper
    does not ablate, the weights by divergence; all three leave :class:`~pfl_lightning.methods.PFLSSL`.

    A client's samples without labels train like the others, and count in its divergence rate and number of samples.

    Every batch has two augmented views of each sample. ``drop_last`` is advised: a smaller last batch has as many
    clusters as it has samples at most, and so has a client with fewer samples than clusters.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        alpha_n: Weight of L_n, the prototype meta-regularizer.
        alpha_p: Weight of L_p, the prototype contrastive regularizer.
        clusters: Of the encodings of a batch, and of all encodings of a client for its divergence rate.
        prototype_temperature: Of L_p; 0.5 in the published implementation, the paper gives none.
        aggregation: ``"divergence"`` averages with weights in inverse proportion to the divergence rates, ``"samples"``
            by numbers of samples.
        divergence_of: ``"encodings"`` measures the rate of the encodings as they are, ``"unit_length"`` of those of
            unit length. The losses hardly see the scale of an encoder, and the rate of encodings as they are does:
            with it the client whose encodings are smallest counts most.
        options: Arguments of :class:`~pfl_lightning.methods.PFLSSL`, such as ``objective``, L_ssl.
    """

    citation = PFLSSL.citation
    loss_names = ("self_supervised", "prototype_meta", "prototype_contrastive")

    cluster_noise: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        alpha_n: float = 0.3,
        alpha_p: float = 0.3,
        clusters: int = 10,
        prototype_temperature: float = 0.5,
        aggregation: str = "divergence",
        divergence_of: str = "encodings",
        **options: Unpack[SelfSupervisedOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("alpha_n", alpha_n)
        check_number("alpha_p", alpha_p)
        check_number("prototype_temperature", prototype_temperature, strict=True)
        check_at_least("clusters", clusters, 1)
        check_choice("aggregation", aggregation, ("divergence", "samples"))
        check_choice("divergence_of", divergence_of, ("encodings", "unit_length"))
        self.alpha_n, self.alpha_p, self.clusters = alpha_n, alpha_p, clusters
        self.prototype_temperature, self.aggregation = prototype_temperature, aggregation
        self.divergence_of = divergence_of
        noise = torch.zeros(STARTS, clusters, num_candidates(clusters))
        self.register_buffer("cluster_noise", noise, persistent=False)

    def configure_aggregator(self, num_clients: int) -> AveragingAggregator:
        """The mean with weights by divergence (section I), or by samples."""
        if self.aggregation == "samples":
            return AveragingAggregator(self, num_clients)
        return DivergenceAwareAggregator(self, num_clients)

    def before_fit(self, context: FitContext) -> int | None:
        """Start what the objective makes again; draw the starts of the k-means of this fit.

        Returns:
            A seed for the k-means on all encodings, after the fit.

        Raises:
            ConfigurationError: Batches have fewer samples than there are clusters.
        """
        super().before_fit(context)
        if self.alpha_n > 0 or self.alpha_p > 0:
            if context.data.batch_size < self.clusters:
                raise ConfigurationError(
                    f"{context.who}, round {context.round + 1}: batches of {context.data.batch_size} samples "
                    f"cannot be divided into {self.clusters} clusters; use a batch_size of at least {self.clusters}, "
                    "or fewer clusters"
                )
            self.cluster_noise.copy_(torch.rand(self.cluster_noise.shape, dtype=torch.float32))  # alike on all devices
        return int(torch.randint(2**62, ())) if self.aggregation == "divergence" else None

    def objective_terms(self, output: ObjectiveOutput) -> dict[str, Tensor]:
        """L_ssl + alpha_n L_n + alpha_p L_p of two views e, o of a batch (Algorithm 1)."""
        terms = super().objective_terms(output)  # L_ssl
        meta = self.alpha_n > 0 and self.uses("prototype_meta")
        contrastive = self.alpha_p > 0 and self.uses("prototype_contrastive")
        if not (meta or contrastive):
            return terms
        encodings = output.encodings  # z_e, z_o
        count = min(self.clusters, len(encodings[0]))
        noise = self.cluster_noise[:, :count, : num_candidates(count)]
        clustering = kmeans(torch.cat(encodings), count, starts=STARTS, noise=noise)
        of_e, of_o = clustering.assignment.chunk(2)  # pseudo-labels
        if meta:  # L_n: z_o against the prototypes of z_e
            terms["prototype_meta"] = self.alpha_n * prototype_meta_loss(*encodings, of_e, of_o, count)
        if contrastive:  # L_p: NT-Xent between the prototypes of p_e and of p_o
            contrast = prototype_contrastive_loss(*output.projections, of_e, of_o, count, self.prototype_temperature)
            terms["prototype_contrastive"] = self.alpha_p * contrast
        return terms

    def make_update(self, context: FitContext, before: int | None) -> ClientUpdate:
        """The shared state and, from the encodings of all that trained at the trained encoder, the divergence rate."""
        if before is None:
            return super().make_update(context, before)
        encodings = features_of(self.encoder, context.data)  # whose classes may not be known
        check_finite(encodings, context)
        if self.divergence_of == "unit_length":
            encodings = F.normalize(encodings, dim=1)
        generator = torch.Generator().manual_seed(before)
        divergence = divergence_rate(encodings, min(self.clusters, len(encodings)), generator=generator)
        return CalibreUpdate(**vars(super().make_update(context, before)), divergence=divergence)


class DivergenceAwareAggregator(AveragingAggregator):
    """Mean of the clients' shared state, w_k proportional to 1 / divergence_k.

    The paper only calls the rate a weighting factor (section I). The weights are those of
    :func:`~pfl_lightning.functional.inverse_divergence_weights`. Only updates with a rate of zero, which wait for the
    smallest positive one of the cohort, are kept until the end of the round.

    Args:
        client: See :class:`~pfl_lightning.server.Aggregator`.
        num_clients: Number of clients, m.
    """

    update_class = CalibreUpdate
    averages = True

    def __init__(self, client: FederatedClient, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self._start_round()

    def _start_round(self) -> None:
        self._smallest = float("inf")
        self._collapsed: list[State] = []

    def receive(self, update: CalibreUpdate) -> None:
        """Add one client's state to the running average."""
        divergence = float(update.divergence)
        if divergence < COLLAPSED:
            self._collapsed.append(update.weights)
            return
        self._smallest = min(self._smallest, divergence)
        self.running_average.update(update.weights, 1.0 / divergence)

    def aggregate(self) -> None:
        """Take the mean."""
        for state in self._collapsed:
            self.running_average.update(state, 1.0 / self._smallest if self._smallest < float("inf") else 1.0)
        self._start_round()
        super().aggregate()
