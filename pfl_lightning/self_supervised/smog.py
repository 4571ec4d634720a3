"""SMoG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_between, check_number
from pfl_lightning.errors import ClientError, ConfigurationError
from pfl_lightning.functional import cluster_means, fit_kmeans
from pfl_lightning.functional.inner_loop import evaluating
from pfl_lightning.self_supervised.objective import (
    Objective,
    ObjectiveOutput,
    features_of,
    in_single_precision,
    of_each_view,
)
from pfl_lightning.self_supervised.target import TargetNetwork, parameters_to_buffers

if TYPE_CHECKING:
    from pfl_lightning.client import FitContext


class SMoG(Objective):
    """SMoG: the first view predicts the group of the second, and groups move with the first view's projections.

    Source: B. Pang et al., Unsupervised Visual Representation Learning by Synchronous Momentum Grouping, ECCV 2022.
    The paper repeats k-means, and copies the target network, every 300 steps. Here both happen at the start of every
    local fit, with k-means on the projections of the client's data.

    Args:
        encoder: See :class:`~pfl_lightning.self_supervised.Objective`.
        hidden: Width of the hidden layers of projector and predictor.
        out: See :class:`~pfl_lightning.self_supervised.Objective`.
        groups: Number of groups; at most a client's number of samples, unless groups are shared.
        beta: Momentum of the groups, in [0, 1].
        temperature: Temperature of the predictions.
        momentum: Momentum of the target network, in [0, 1].
        share_groups: Whether groups are averaged like weights, from random ones, as in Calibre's published code;
            otherwise every fit finds its groups by k-means.
    """

    shared: tuple[str, ...] = ("projector.*", "predictor.*")

    def __init__(
        self,
        encoder: nn.Module,
        hidden: int = 2048,
        out: int = 256,
        groups: int = 100,
        beta: float = 0.99,
        temperature: float = 0.1,
        momentum: float = 0.99,
        share_groups: bool = False,
    ) -> None:
        super().__init__(encoder, hidden, out)
        check_at_least("groups", groups, 1)
        check_number("temperature", temperature, strict=True)
        check_between("beta", beta, 0, 1)
        self.num_groups, self.beta, self.temperature, self.share_groups = groups, beta, temperature, share_groups
        self.projector = self.heads.SMoGProjectionHead(self.in_features, hidden, out)
        self.predictor = self.heads.SMoGPredictionHead(out, hidden, out)
        self.target = TargetNetwork(encoder, self.projector, momentum=momentum)
        random = F.normalize(torch.randn(groups, out), dim=1)  # until a fit finds others
        self.groups: Any = parameters_to_buffers(self.heads.SMoGPrototypes(random, beta), persistent=share_groups)
        if share_groups:
            self.shared = (*type(self).shared, "groups.*")

    def check_samples(self, samples: Mapping[int, int]) -> None:
        """Refuse more groups to find than a client has samples; see :meth:`Objective.check_samples`."""
        client, count = min(samples.items(), key=lambda item: item[1])
        if self.num_groups > count and not self.share_groups:
            raise ConfigurationError(
                f"SMoG looks for {self.num_groups} groups in the {count} training samples of client {client}; set "
                f"groups to at most {count}, share the groups (share_groups=True), or give clients more samples"
            )

    def before_fit(self, encoder: nn.Module, context: FitContext) -> None:
        """Start the target network, and find groups.

        Raises:
            ConfigurationError: There are more groups to find than samples.
            ClientError: The client's projections are not finite.
        """
        self.target.start(encoder, self.projector)
        if not self.share_groups:
            self._find_groups(encoder, context)

    @torch.no_grad()
    def _find_groups(self, encoder: nn.Module, context: FitContext) -> None:
        self.check_samples({context.client: context.data.num_samples})
        with evaluating(self.projector), context.data.forward_context():
            projections = self.projector(features_of(encoder, context.data))
        if not bool(torch.isfinite(projections).all()):
            raise ClientError(
                context.client,
                context.round,
                "the projections of its training data are not finite, so SMoG finds no groups; check this "
                "client's data for NaN, lower the learning rate or clip the gradient",
            )
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        found = fit_kmeans(projections, self.num_groups, starts=1, generator=generator)
        self.groups.group_features.copy_(F.normalize(found.centroids, dim=1))

    def forward(self, encoder: nn.Module, first: Tensor, second: Tensor) -> ObjectiveOutput:
        """See :meth:`Objective.forward`."""
        self.target.follow(encoder, self.projector)
        encodings = of_each_view(encoder, first, second)
        projections = of_each_view(self.projector, *encodings)
        predicted, keys = self.predictor(projections[0]), self.target(second)
        return ObjectiveOutput(in_single_precision(self._loss, projections[0], predicted, keys), encodings, projections)

    def _loss(self, projections: Tensor, predicted: Tensor, keys: Tensor) -> Tensor:
        assigned = self._assign(keys)
        groups = self._moved(projections)
        loss = F.cross_entropy(self.groups(predicted, groups, self.temperature), assigned)
        with torch.no_grad():
            self.groups.group_features.copy_(groups)
        return loss

    @torch.no_grad()
    def _assign(self, rows: Tensor) -> Tensor:
        """Index of the group of the highest cosine, (B,)."""
        scores: Tensor = self.groups(rows, self.groups.group_features.to(rows.dtype))
        return scores.argmax(dim=1)

    def _moved(self, projections: Tensor) -> Tensor:
        """Groups, moved towards the mean of the projections that belong to each.

        Equals lightly's ``get_updated_group_features``, without data-dependent shapes. The gradient reaches the
        projections: groups and features learn together, hence synchronous.
        """
        before: Tensor = self.groups.group_features.to(projections.dtype)
        means, present = cluster_means(projections, self._assign(projections), self.num_groups)
        moved = self.beta * before + (1.0 - self.beta) * means
        return torch.where(present.unsqueeze(1), moved, before)
