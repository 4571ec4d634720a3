"""Prototypes of clusters, and Calibre's functions of them: two losses, the divergence rate and the server's weights.

Clusters come from :func:`~pfl_lightning.functional.kmeans` on the encodings of both views
of a batch, so that some may have no sample in one of the views.
The losses leave these out by masks, not by shapes, so that `torch.func`
can differentiate and vectorize them over clients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.functional.clustering import fit_kmeans
from pfl_lightning.functional.contrastive import supervised_contrastive_loss
from pfl_lightning.functional.numerics import at_least_single, check_tensor, product, unit_rows
from pfl_lightning.functional.tensor_lists import float64_device

ROUNDING = 16
"""Roundings of an encoding below which it is at its centroid."""


def cluster_means(features: Tensor, assignment: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Mean of the features of each cluster, and a mask of the clusters that are not empty.

    Args:
        features: (N, d).
        assignment: (N,) integer cluster of each, in 0..K-1; a sample of another number belongs to none.
        num_clusters: K.

    Returns:
        The means, (K, d), in single precision at least, also under autocast; zero for an empty cluster. The gradient
        reaches the features. And which clusters have a member, (K,) bool.

    Raises:
        ValueError: if shapes do not fit together, features are not floating point, the assignment is not of integers,
            or there is no cluster.

    Example:
        >>> import torch
        >>> from pfl_lightning.functional import cluster_means
        >>> means, present = cluster_means(torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([0, 0, 2]), num_clusters=3)
        >>> means.flatten().tolist(), present.tolist()
        ([2.0, 0.0, 9.0], [True, False, True])
    """
    _check(features, assignment, num_clusters, "features", "assignment")
    values = at_least_single(features)
    numbers = torch.arange(num_clusters, device=features.device).unsqueeze(1)
    members = assignment.unsqueeze(0) == numbers  # (K, N)
    counts = members.sum(dim=1)
    means = product(members.to(values.dtype) / counts.clamp(min=1).to(values.dtype).unsqueeze(1), values)
    return means, counts > 0


def prototype_meta_loss(
    support: Tensor, queries: Tensor, support_labels: Tensor, query_labels: Tensor, num_clusters: int
) -> Tensor:
    """L_n of Calibre: view o, classified by its distances to the prototypes of view e (section IV-B, Algorithm 1).

    Prototypes are the means of view e's encodings in each cluster (of Snell et al. 2017, the prototypical networks).
    An encoding of view o is in cluster c with the probability

        exp(-||q - p_c||^2) / sum_c' exp(-||q - p_c'||^2),

    q and p being the encoding and the prototypes divided by their L2 norm, and the loss is the cross entropy against
    the pseudo-labels. Its gradient reaches both views. Computed in single precision at least, also under autocast.

    Args:
        support: (N, d) encodings of view e.
        queries: (M, d) encodings of view o.
        support_labels: (N,) integer cluster of each of view e, in 0..K-1.
        query_labels: (M,) integer cluster of each of view o, in 0..K-1.
        num_clusters: K.

    Returns:
        A scalar, in single precision for half-precision encodings. A cluster without an encoding in view e has no
        prototype: it has no share in the softmax, and its encodings in view o contribute nothing, neither to the sum
        nor to the number that it is divided by. A cluster without an encoding in view o keeps its prototype, as a
        negative. (In the published code the loss is NaN as soon as a cluster is absent from a view.) Zero where nothing
        is left.

    Raises:
        ValueError: if shapes do not fit together, encodings are not floating point, labels are not integers, or there
            is no cluster.

    Example:
        The query lies at squared distance 0 from its prototype and 2 from the other: log(1 + exp(-2)).

        >>> import torch
        >>> from pfl_lightning.functional import prototype_meta_loss
        >>> support, clusters = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
        >>> prototype_meta_loss(support, support[:1], clusters, clusters[:1], num_clusters=2)
        tensor(0.1269)
    """
    _check(support, support_labels, num_clusters, "support", "support_labels")
    _check(queries, query_labels, num_clusters, "queries", "query_labels", support.shape[1])
    means, present = cluster_means(support, support_labels, num_clusters)
    prototypes, points = unit_rows(means), unit_rows(at_least_single(queries))
    squares = points.square().sum(dim=1, keepdim=True) + prototypes.square().sum(dim=1)
    scores = 2 * product(points, prototypes.T) - squares  # -||q - p_c||^2, (M, K)
    # The lowest finite number in place of -inf: the share is zero just as well, and the gradient is not NaN.
    scores = torch.where(present, scores, torch.finfo(scores.dtype).min)
    losses = F.cross_entropy(scores, query_labels.long(), reduction="none")
    classified = present[query_labels.long()]
    return torch.where(classified, losses, 0.0).sum() / classified.sum().clamp(min=1)


def prototype_contrastive_loss(
    first: Tensor,
    second: Tensor,
    first_labels: Tensor,
    second_labels: Tensor,
    num_clusters: int,
    temperature: float = 0.5,
) -> Tensor:
    """L_p of Calibre: NT-Xent between the prototypes of two views (section IV-B, Algorithm 1).

    Prototypes are the means of a view's projections in each cluster; the two of the same cluster are positives, all
    others are contrast. The gradient reaches both views. Computed in single precision at least, also under autocast.

    Args:
        first: (N, d) projections of view e.
        second: (M, d) projections of view o.
        first_labels: (N,) integer cluster of each of view e, in 0..K-1.
        second_labels: (M,) integer cluster of each of view o, in 0..K-1.
        num_clusters: K.
        temperature: finite and positive; 0.5 in the published code, the paper gives none.

    Returns:
        A scalar, in single precision for half-precision projections: the mean over both prototypes of every cluster
        that both views have. Clusters that one of them lacks are left out, also as contrast. Zero where no cluster
        or one is left.

    Raises:
        ValueError: if shapes do not fit together, projections are not floating point, labels are not integers, there is
            no cluster, or the temperature is not finite and positive.

    Example:
        Equal views with orthogonal prototypes: one positive of similarity 1, two negatives of similarity 0.

        >>> import torch
        >>> from pfl_lightning.functional import prototype_contrastive_loss
        >>> view, clusters = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
        >>> prototype_contrastive_loss(view, view, clusters, clusters, 2, temperature=1.0)  # -log(e / (e + 2))
        tensor(0.5514)
    """
    _check(first, first_labels, num_clusters, "first", "first_labels")
    _check(second, second_labels, num_clusters, "second", "second_labels", first.shape[1])
    first_means, in_first = cluster_means(first, first_labels, num_clusters)
    second_means, in_second = cluster_means(second, second_labels, num_clusters)
    pairs = torch.stack([first_means, second_means], dim=1)  # (K, 2, d)
    return supervised_contrastive_loss(pairs, None, temperature, present=in_first & in_second)


@torch.no_grad()
def divergence_rate(
    encodings: Tensor,
    num_clusters: int = 10,
    *,
    starts: int = 10,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Divergence rate of a client (Calibre, section I): the mean distance of its encodings to their prototypes.

    K-means on all encodings; the mean over clusters of the mean Euclidean distance of a cluster's members to its
    centroid. A cluster without members, as there are where fewer than `num_clusters` encodings differ, is left out.

    Args:
        encodings: (N, d), finite, at least as many as clusters.
        num_clusters: number of clusters.
        starts: number of starts of the k-means.
        generator: for the starts; None for torch's default one.

    Returns:
        A scalar >= 0, in single precision at least. Distances within the rounding of the encodings are zero, so that
        a client whose encodings all agree, or are no more than there are clusters, has the rate 0.

    Raises:
        ValueError: as :func:`~pfl_lightning.functional.fit_kmeans` does.

    Example:
        The members of the two clusters are 1 and 2 away from their centroids; the clusters count alike.

        >>> import torch
        >>> from pfl_lightning.functional import divergence_rate
        >>> encodings = torch.tensor([[0.0], [2.0], [50.0], [54.0]])
        >>> divergence_rate(encodings, num_clusters=2, generator=torch.Generator().manual_seed(0))
        tensor(1.5000)
    """
    found = fit_kmeans(encodings, num_clusters, starts=starts, generator=generator)
    values = at_least_single(encodings)
    distances = torch.linalg.vector_norm(values - found.centroids[found.assignment], dim=1)
    # A centroid is exact but for rounding, of the size of the encodings, where its members are all alike.
    rounding = ROUNDING * torch.finfo(values.dtype).eps * torch.linalg.vector_norm(values, dim=1).max()
    distances = torch.where(distances > rounding, distances, 0.0)
    means, present = cluster_means(distances.unsqueeze(1), found.assignment, num_clusters)
    return means.sum() / present.sum()


def inverse_divergence_weights(divergences: Tensor | Sequence[float]) -> Tensor:
    """Weights of a cohort's clients, in inverse proportion to their divergence rates (Calibre).

    The paper only calls the rate "a weighting factor during the server aggregation" (section I).

    A rate of zero, for which the formula says infinity, counts as the smallest positive one of the cohort: no client
    then outweighs another whose rate is as good, and a client whose encoder has collapsed, or who has no more samples
    than clusters, does not become the server's model. Where no rate is positive, the clients whose rate is zero share
    equally. A client whose rate is not finite gets weight zero.

    Args:
        divergences: (m,) rates of m >= 1 clients.

    Returns:
        (m,) float64 weights >= 0 that add up to one.

    Raises:
        ValueError: if there are no rates, one is negative, or none is finite.

    Example:
        >>> from pfl_lightning.functional import inverse_divergence_weights
        >>> inverse_divergence_weights([1.0, 3.0])  # 1 and 1/3, divided by their sum
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    # Not as_tensor, which reads a list in single precision.
    rates = divergences if isinstance(divergences, Tensor) else torch.tensor(divergences, dtype=torch.float64)
    rates = rates.detach().to(float64_device(rates.device), torch.float64)
    if rates.ndim != 1 or len(rates) == 0:
        raise ValueError(f"expected one divergence rate per client, shape (m,) with m >= 1, got {tuple(rates.shape)}")
    if bool((rates < 0).any()):
        raise ValueError(f"divergence rates are mean distances and cannot be negative, got {rates.tolist()}")
    finite = rates.isfinite()
    if not bool(finite.any()):
        raise ValueError(
            f"no divergence rate is finite, got {rates.tolist()}: has the training of all clients diverged?"
        )
    smallest = torch.where(finite & (rates > 0), rates, torch.inf).min()
    # smallest / rate and not 1 / rate, which overflows where rates are tiny.
    shares = torch.where(rates == 0, 1.0, smallest / rates)
    shares = torch.where(finite, shares, 0.0)
    return shares / shares.sum()


def _check(
    features: Tensor, labels: Tensor, num_clusters: int, name: str, name_of_labels: str, width: int | None = None
) -> None:
    check_tensor(name, features, ("N", "d" if width is None else width))
    check_tensor(name_of_labels, labels, (len(features),), "integers")
    if num_clusters < 1:
        raise ValueError(f"num_clusters must be at least 1, got {num_clusters}")
