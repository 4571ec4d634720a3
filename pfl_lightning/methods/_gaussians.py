"""Classes as Gaussians of one covariance: their mixtures, and the Bayes classifiers of these."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Gaussians", "MixedScores"]


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
