"""pFedFDA: generative classifiers from global and own feature distributions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext, Phase
from pfl_lightning.errors import ClientError
from pfl_lightning.functional import RunningAverage
from pfl_lightning.messages import Broadcast, ClientUpdate, statistics_field
from pfl_lightning.methods._class_means import finite_features
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import AveragingAggregator
from pfl_lightning.state.tensors import TensorDict


@dataclass(frozen=True, kw_only=True)
class PFedFDABroadcast(Broadcast):
    """The global encoder, and the Gaussians of the classes' features.

    Attributes:
        means: Means, (C, d).
        covariance: Covariance, the same for all classes, (d, d).
    """

    means: Tensor = statistics_field(shape="C d", floating=True)
    covariance: Tensor = statistics_field(shape="d d", floating=True)


@dataclass(frozen=True, kw_only=True)
class PFedFDAUpdate(ClientUpdate):
    """The trained encoder, and the client's Gaussians at it, mixed with the global ones.

    Attributes:
        means: Means, (C, d).
        covariance: Covariance, (d, d).
    """

    means: Tensor = statistics_field(shape="C d", floating=True, tells="class means")
    covariance: Tensor = statistics_field(shape="d d", floating=True, covariance=True, tells="feature products")


class PFedFDA(FederatedClient):
    """The head is the Bayes classifier of Gaussian features, global ones in training, and mixed with own ones after it.

    The encoder trains under the classifier of the global Gaussians and the client's class shares. The client then
    estimates its own Gaussians and finds by cross-validation how much of them, beta, to mix with the global ones. The
    server averages encoders and mixed Gaussians. Before an evaluation the same mixture makes the client's classifier.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        eps: Added to class shares, and the share of a multiple of the identity in the covariance of a classifier.
        ridge: Added to the diagonal of covariances. It bounds the weights of the classifiers, and with them the
            gradients of local fits: features that hardly vary would get weights without bound.
        folds: Folds of the cross-validation.
        betas: ``"two"`` finds one beta for the means and one for the covariance, ``"one"`` a common one; ``"global"``
            holds it at 0, ``"own"`` at 1.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "Personalized Federated Learning via Feature Distribution Adaptation", "McLaughlin and Su", "NeurIPS", 2024
    )
    shared = ("encoder.*",)
    fixed = ("head.*",)
    batch_norm = "shared"

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        eps: float = 1e-4,
        ridge: float = 1.0,
        folds: int = 2,
        betas: str = "two",
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("eps", eps, strict=True)
        check_number("ridge", ridge, strict=True)
        check_at_least("folds", folds, 2)
        check_choice("betas", betas, ("two", "one", "global", "own"))
        self.eps, self.ridge, self.folds, self.betas = eps, ridge, folds, betas
        width = self.feature_width
        first = {"means": torch.rand(num_classes, width), "covariance": torch.eye(width)}
        self.received = TensorDict(first, persistent=False)  # the global Gaussians

    def receive(self, broadcast: PFedFDABroadcast) -> None:
        """Take over the encoder and the global Gaussians."""
        super().receive(broadcast)
        self.received.assign({"means": broadcast.means, "covariance": broadcast.covariance})

    def phases(self) -> tuple[Phase, ...]:
        """The encoder, under the classifier of the global Gaussians."""
        return (Phase("encoder", ("encoder.*",), self.epochs),)

    def before_fit(self, context: FitContext) -> None:
        """The classifier of the global Gaussians."""
        self._set_head(self._global(), context)

    def before_evaluation(self, context: FitContext) -> None:
        """The classifier of the client's mixture, at the encoder that is evaluated; the global one without features."""
        try:
            gaussians = self._adapted(context)
        except ClientError:  # features that are not finite: such a client is left out of rounds, not of evaluations
            gaussians = self._global()
        self._set_head(gaussians, context)

    def make_update(self, context: FitContext, before: None) -> PFedFDAUpdate:
        """The trained encoder and the mixture at it."""
        adapted, like = self._adapted(context), self.statistics_like()
        means, covariance = adapted.means.to(like), adapted.covariance.to(like)
        return PFedFDAUpdate(**vars(super().make_update(context, before)), means=means, covariance=covariance)

    # ------------------------------------------------------------------ Gaussians, in double precision on the CPU

    def _global(self) -> Gaussians:
        received = {name: value.to("cpu", torch.float64) for name, value in self.received.as_state().items()}
        return Gaussians(received["means"], received["covariance"])

    @torch.no_grad()
    def _set_head(self, gaussians: Gaussians, context: FitContext) -> None:
        counts = self.count_classes(context).to("cpu", torch.float64)
        priors = counts / counts.sum() + self.eps
        weights, biases = gaussians.classifier(priors / priors.sum(), self.eps)
        self.head.weight.copy_(weights)
        self.head.bias.copy_(biases)

    def _adapted(self, context: FitContext) -> Gaussians:
        """The client's Gaussians at the current encoder, mixed with the global ones."""
        features, labels = finite_features(self, context)
        features, labels = features.to("cpu", torch.float64), labels.cpu()
        received = self._global()
        counts = torch.bincount(labels, minlength=self.num_classes).double()
        priors = counts / counts.sum() + self.eps
        betas = self._find_betas(features, labels, received, priors / priors.sum())
        return self._estimate(features, labels, received).mixed(received, betas)

    def _estimate(self, features: Tensor, labels: Tensor, received: Gaussians) -> Gaussians:
        """Means of the classes with more samples than folds, the global ones of the others; and the covariance."""
        onehot = F.one_hot(labels, self.num_classes).double()
        counts = onehot.sum(dim=0)
        own = onehot.T @ features / counts.clamp(min=1)[:, None]
        means = torch.where((counts > self.folds)[:, None], own, received.means)
        centered = features - means[labels]
        covariance = centered.T @ centered / max(len(labels) - 1, 1)
        return Gaussians(means, covariance + self.ridge * torch.eye(features.shape[1]).double())

    def _find_betas(self, features: Tensor, labels: Tensor, received: Gaussians, priors: Tensor) -> Tensor:
        """The betas of least cross entropy on the folds that were held out."""
        held = {"global": 0.0, "own": 1.0}
        if self.betas in held:
            return torch.full((1,), held[self.betas]).double()
        fold = self._draw_folds(labels)
        if not bool((fold >= 0).any()):  # no class has enough samples
            return torch.zeros(1).double()
        parts = [((fold >= 0) & (fold != k), fold == k) for k in range(self.folds)]
        estimates = [self._estimate(features[train], labels[train], received) for train, _ in parts]
        tested = [
            (MixedScores(estimate, received, self.eps, features[test]), labels[test])
            for estimate, (_, test) in zip(estimates, parts, strict=True)
        ]
        # Sigmoids of what is searched: clipped betas have no gradient outside [0, 1], where a step may leave them.
        searched = torch.zeros(2 if self.betas == "two" else 1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([searched], max_iter=20, tolerance_grad=1e-4, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            betas = searched.sigmoid()
            losses = [F.cross_entropy(scores.at(betas, priors), own) for scores, own in tested]
            total = torch.stack(losses).sum()
            total.backward()
            return total

        with torch.enable_grad():
            optimizer.step(loss)
        return searched.detach().nan_to_num(0.0).sigmoid()

    def _draw_folds(self, labels: Tensor) -> Tensor:
        """Fold of each sample, every class divided evenly; -1 in classes with fewer samples than folds."""
        fold = torch.full_like(labels, -1)
        for c in labels.unique():
            rows = (labels == c).nonzero().flatten()
            if len(rows) >= self.folds:
                fold[rows[torch.randperm(len(rows))]] = torch.arange(len(rows)) % self.folds
        return fold


class PFedFDAAggregator(AveragingAggregator, of=PFedFDA):
    """Averages encoders and the clients' Gaussians, weighted by samples."""

    update_class = PFedFDAUpdate
    averages = True

    def __init__(self, client: PFedFDA, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.gaussians = TensorDict({name: value.clone() for name, value in client.received.as_state().items()})
        self._mean = RunningAverage()

    def broadcast(self, client: int, round: int) -> PFedFDABroadcast:
        """The encoder and the Gaussians, the same for every client."""
        weights, gaussians = self.weights.as_state(), self.gaussians.as_state()
        return PFedFDABroadcast(client=client, round=round, weights=weights, **gaussians)

    def receive(self, update: PFedFDAUpdate) -> None:
        """Add one client's encoder and Gaussians to the averages."""
        if not update.covariance.any():
            update.refuse("PFedFDAUpdate.covariance is 0, from which no classifier follows, expected a positive one")
        self._mean.update({"means": update.means, "covariance": update.covariance}, update.num_samples)
        super().receive(update)

    def aggregate(self) -> None:
        """Take both means."""
        mean, self._mean = self._mean, RunningAverage()
        if mean.total_weight > 0:
            self.gaussians.assign(mean.result())
        super().aggregate()


@dataclass(frozen=True)
class Gaussians:
    """Features of each class as a Gaussian, of one covariance for all.

    Attributes:
        means: (C, d).
        covariance: (d, d).
    """

    means: Tensor
    covariance: Tensor

    def mixed(self, other: Gaussians, betas: Tensor) -> Gaussians:
        """These by beta and others by 1 - beta; the first beta is of the means, the last one of the covariance."""
        of_means, of_covariance = betas[0], betas[-1]
        return Gaussians(
            of_means * self.means + (1 - of_means) * other.means,
            of_covariance * self.covariance + (1 - of_covariance) * other.covariance,
        )

    def classifier(self, priors: Tensor, shrinkage: float) -> tuple[Tensor, Tensor]:
        """Weights (C, d) and biases (C,) of the Bayes classifier, Sigma^-1 mu and -mu Sigma^-1 mu / 2 + log prior."""
        weights = torch.linalg.solve(self.shrunk(shrinkage), self.means.T).T
        return weights, -(self.means * weights).sum(dim=1) / 2 + priors.log()

    def shrunk(self, shrinkage: float) -> Tensor:
        """Sigma of a classifier: the covariance, mixed with a multiple of the identity of the same trace."""
        identity = torch.eye(len(self.covariance)).to(self.covariance)
        return (1 - shrinkage) * self.covariance + shrinkage * self.covariance.trace() / len(identity) * identity


class MixedScores:
    """Scores of samples under the Bayes classifiers of mixtures, in coordinates in which no matrix need be solved.

    Sigma of a mixture is beta Sigma_own + (1 - beta) Sigma_global. Some basis W makes Sigma_global the identity and
    Sigma_own a diagonal matrix of values l; in it, that of every mixture is diagonal, beta l + 1 - beta.

    Args:
        own: Gaussians of the client.
        other: The global ones.
        shrinkage: See :meth:`Gaussians.shrunk`.
        features: The samples, (n, d).
    """

    def __init__(self, own: Gaussians, other: Gaussians, shrinkage: float, features: Tensor) -> None:
        variances, axes = torch.linalg.eigh(other.shrunk(shrinkage))
        least = variances[-1] * torch.finfo(variances.dtype).eps  # positive, whatever rounding has made of them
        white = axes / variances.clamp(min=least).sqrt()
        self.variances, rotation = torch.linalg.eigh(white.T @ own.shrunk(shrinkage) @ white)
        basis = white @ rotation
        self.features, self.own, self.other = features @ basis, own.means @ basis, other.means @ basis

    def at(self, betas: Tensor, priors: Tensor) -> Tensor:
        """Scores (n, C) under the mixture by some betas, see :meth:`Gaussians.mixed`."""
        means = torch.lerp(self.other, self.own, betas[0])
        weights = means / (betas[-1] * self.variances + (1 - betas[-1]))
        return F.linear(self.features, weights, -(means * weights).sum(dim=1) / 2 + priors.log())
