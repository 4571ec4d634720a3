"""Scores of mixed Gaussians in one basis against those of the classifier of each mixture."""

import pytest
import torch
from torch.nn import functional as F

from pfl_lightning.methods.pfedfda import Gaussians, MixedScores

CLASSES, WIDTH, SHRINKAGE = 3, 6, 1e-4


def gaussians(seed, samples):
    torch.manual_seed(seed)
    rows = torch.randn(samples, WIDTH).double() @ torch.randn(WIDTH, WIDTH).double()
    return Gaussians(torch.randn(CLASSES, WIDTH).double(), rows.T @ rows / samples)


@pytest.mark.parametrize("betas", [[0.0], [1.0], [0.3], [0.3, 0.8]])
@pytest.mark.parametrize("samples", [40, 3])  # the latter: covariances of less than full rank
def test_scores_of_a_mixture_are_those_of_its_classifier(betas, samples):
    own, other = gaussians(0, samples), gaussians(1, samples)
    betas = torch.tensor(betas, dtype=torch.float64, requires_grad=True)
    features, priors = torch.randn(10, WIDTH).double(), torch.tensor([0.5, 0.2, 0.3]).double()
    scores = MixedScores(own, other, SHRINKAGE, features).at(betas, priors)
    weights, biases = own.mixed(other, betas).classifier(priors, SHRINKAGE)
    expected = F.linear(features, weights, biases)
    torch.testing.assert_close(scores, expected, rtol=1e-7, atol=1e-7)
    labels = torch.arange(10) % CLASSES
    found, wanted = (torch.autograd.grad(F.cross_entropy(s, labels), betas)[0] for s in (scores, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
