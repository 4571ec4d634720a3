"""Pure functions on tensors: averages, losses, class statistics, combination weights, clusters, representations.

Nothing here keeps state between rounds; whoever calls owns the state.
"""

from pfl_lightning.functional.attribution import layer_conductance, rank_correlation, rank_scores
from pfl_lightning.functional.averaging import RunningAverage, weighted_average
from pfl_lightning.functional.clustering.kmeans import Clustering, fit_kmeans, kmeans
from pfl_lightning.functional.clustering.prototypes import (
    cluster_means,
    divergence_rate,
    inverse_divergence_weights,
    prototype_contrastive_loss,
    prototype_meta_loss,
)
from pfl_lightning.functional.combination.weights import combination_weights
from pfl_lightning.functional.contrastive import supervised_contrastive_loss
from pfl_lightning.functional.losses import alignment_loss, balanced_softmax_loss, proximal_term
from pfl_lightning.functional.nearest_neighbor import nearest_neighbor_accuracy
from pfl_lightning.functional.representations import class_separation, linear_cka, pairwise_linear_cka
from pfl_lightning.functional.statistics.class_statistics import ClassStatistics
from pfl_lightning.functional.statistics.gaussians import (
    covariance_factors,
    covariances_from_factors,
    sample_class_gaussians,
)
from pfl_lightning.functional.statistics.summaries import feature_variance, weighted_class_means

__all__ = [
    "ClassStatistics",
    "Clustering",
    "RunningAverage",
    "alignment_loss",
    "balanced_softmax_loss",
    "class_separation",
    "cluster_means",
    "combination_weights",
    "covariance_factors",
    "covariances_from_factors",
    "divergence_rate",
    "feature_variance",
    "fit_kmeans",
    "inverse_divergence_weights",
    "kmeans",
    "layer_conductance",
    "linear_cka",
    "nearest_neighbor_accuracy",
    "pairwise_linear_cka",
    "prototype_contrastive_loss",
    "prototype_meta_loss",
    "proximal_term",
    "rank_correlation",
    "rank_scores",
    "sample_class_gaussians",
    "supervised_contrastive_loss",
    "weighted_average",
    "weighted_class_means",
]
