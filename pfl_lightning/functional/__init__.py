"""Pure functions on tensors, from which clients and servers are built.

================================================  ==============================================================
``losses``                                        alignment, balanced softmax, distillation, distance of two sets
                                                  of features, proximal term, terms whose gradients are given
``contrastive``                                   supervised contrastive loss and NT-Xent
``class_statistics``, ``gaussians``               counts, means and covariances of features by class (FedPAC, DC-PFL)
``combination``, ``simplex_qp``                   weights for combining the clients' heads (FedPAC)
``clustering``, ``prototypes``                    k-means, prototypes of clusters and Calibre's losses on them
``inner_loop``                                    a network at given parameters, inner gradient steps (APFL, pFedMe)
``neighbors``                                     accuracy of the nearest neighbor, probabilities of the k nearest
``robust``                                        averages that a few inputs cannot move at will, scores of Krum
``low_rank``                                      codec that keeps a share of a tensor's squared norm (FedKD)
``representations``                               measures for the inspection of trained encoders
``numerics``                                      shapes and precision, sums and products, square roots safe at zero
``tensor_lists``                                  moves, copies and magnitudes of many tensors, their weighted
                                                  averages (FedAvg), and the server's step
================================================  ==============================================================

No function keeps state between calls; the two accumulators, ``RunningAverage`` and ``ClassStatistics``, belong to the
caller. Losses have no data-dependent shapes, so that ``torch.func`` can differentiate and vectorize them over clients.
"""

from pfl_lightning.functional.class_statistics import ClassStatistics
from pfl_lightning.functional.clustering import Clustering, fit_kmeans, kmeans
from pfl_lightning.functional.combination import combination_weights, feature_variance, weighted_class_means
from pfl_lightning.functional.contrastive import supervised_contrastive_loss
from pfl_lightning.functional.gaussians import covariance_factors, sample_class_gaussians
from pfl_lightning.functional.inner_loop import descend, hessian_product, loss_and_gradients, output_at, scores_at
from pfl_lightning.functional.losses import alignment_loss, balanced_softmax_loss, kl_divergence, proximal_term
from pfl_lightning.functional.low_rank import compress, compress_state, expand, expand_state
from pfl_lightning.functional.neighbors import nearest_neighbor_accuracy, neighbor_probabilities
from pfl_lightning.functional.prototypes import (
    cluster_means,
    divergence_rate,
    inverse_divergence_weights,
    prototype_contrastive_loss,
    prototype_meta_loss,
)
from pfl_lightning.functional.representations import (
    class_separation,
    layer_conductance,
    linear_cka,
    pairwise_linear_cka,
    rank_correlation,
    rank_scores,
)
from pfl_lightning.functional.tensor_lists import RunningAverage, server_step, weighted_average

__all__ = [
    "ClassStatistics",
    "Clustering",
    "RunningAverage",
    "alignment_loss",
    "balanced_softmax_loss",
    "class_separation",
    "cluster_means",
    "combination_weights",
    "compress",
    "compress_state",
    "covariance_factors",
    "descend",
    "divergence_rate",
    "expand",
    "expand_state",
    "feature_variance",
    "fit_kmeans",
    "hessian_product",
    "inverse_divergence_weights",
    "kl_divergence",
    "kmeans",
    "layer_conductance",
    "linear_cka",
    "loss_and_gradients",
    "nearest_neighbor_accuracy",
    "neighbor_probabilities",
    "output_at",
    "pairwise_linear_cka",
    "prototype_contrastive_loss",
    "prototype_meta_loss",
    "proximal_term",
    "rank_correlation",
    "rank_scores",
    "sample_class_gaussians",
    "scores_at",
    "server_step",
    "supervised_contrastive_loss",
    "weighted_average",
    "weighted_class_means",
]
