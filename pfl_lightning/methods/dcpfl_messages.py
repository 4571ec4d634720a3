"""What DC-PFL's clients upload: how it is made, checked and read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.errors import ClientError, InvalidMessageError
from pfl_lightning.functional import ClassStatistics, covariance_factors
from pfl_lightning.functional.statistics.gaussians import covariances_by_class
from pfl_lightning.messages import ClientUpdate, statistics_field
from pfl_lightning.methods.class_means import ClassMeansUpdate, check_class_means, class_statistics, spread

__all__ = ["DCPFLUpdate", "dcpfl_update", "statistics_of"]


@dataclass(frozen=True, kw_only=True)
class DCPFLUpdate(ClassMeansUpdate):
    """Class means (6), counts, and covariances (7): as factors, or as full matrices.

    Attributes:
        factors: F_c with F_c^T F_c = Sigma_c, of min(n_kc - 1, d) rows at most each, below one another, (R, d);
            ``None`` without calibration or as matrices.
        ranks: Rows of each class among them, (K,), int64.
        covariances: Sigma_c, (K, d, d); ``None`` without calibration or as factors.
    """

    factors: Tensor | None = statistics_field(default=None)
    ranks: Tensor | None = statistics_field(default=None)
    covariances: Tensor | None = statistics_field(default=None)


def dcpfl_update(client: FederatedClient, context: FitContext, covariances: bool, factors: bool) -> DCPFLUpdate:
    """Class means (6), counts and covariances (7) of the client's training data at its encoder as it is.

    Args:
        client: The client after its fit.
        context: Whose fit it was.
        covariances: Whether covariances are uploaded.
        factors: Whether as factors.

    Raises:
        ClientError: The features are not finite, or a covariance could not be decomposed.
    """
    statistics, like = class_statistics(client, context, with_covariances=covariances), client.head.weight
    classes = statistics.counts.nonzero().flatten()
    rows = ranks = matrices = None
    if covariances and factors:
        try:
            rows, ranks = covariance_factors(statistics)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # torch exports it in passing
            raise ClientError(
                context.client,
                context.round,
                f"a class covariance of its features could not be decomposed ({error}); look for features that are "
                "very large or nearly the same, lower the learning rate, or upload matrices (factors=False)",
            ) from error
        rows, ranks = rows.to(like), ranks[classes]
    elif covariances:
        matrices = like.new_zeros(len(classes), statistics.num_features, statistics.num_features)
        places = {y: place for place, y in enumerate(classes.tolist())}
        for y, covariance in statistics.covariances_by_class().items():
            matrices[places[y]] = covariance
    return DCPFLUpdate(
        client=context.client,
        round=context.round,
        num_samples=context.data.num_samples,
        means=statistics.means[classes].to(like),
        classes=classes,
        counts=statistics.counts[classes],
        factors=rows,
        ranks=ranks,
        covariances=matrices,
    )


def statistics_of(
    update: ClientUpdate, num_classes: int, width: int, covariances: bool, factors: bool
) -> ClassStatistics:
    """The client's class statistics as it had them, checked, on the CPU; the cost is that of the classes it has.

    Args:
        update: What the client uploaded.
        num_classes: Number of classes, C.
        width: Of the features, d.
        covariances: Whether covariances are expected.
        factors: Whether as factors.

    Raises:
        InvalidMessageError: Names the client, the round and the field.
    """
    checked = check_class_means(update, num_classes, width)
    assert isinstance(checked, DCPFLUpdate)
    counts = spread(checked.counts, checked.classes, num_classes).cpu()
    means = spread(checked.means, checked.classes, num_classes).to("cpu", torch.float64)
    try:
        if not covariances:
            return ClassStatistics.from_moments(counts, means, square_deviations=torch.zeros(num_classes))
        by_class = _from_factors(checked, num_classes, width) if factors else _from_matrices(checked, width)
        return ClassStatistics.from_moments(counts, means, by_class)
    except ValueError as error:
        raise InvalidMessageError(checked.client, checked.round, str(error)) from error


def _from_factors(update: DCPFLUpdate, num_classes: int, width: int) -> dict[int, Tensor]:
    if update.factors is None or update.ranks is None:
        raise ValueError("factors and ranks are missing")
    update.check_shape("ranks", update.ranks, len(update.classes))
    ranks = spread(update.ranks, update.classes, num_classes).cpu()
    return covariances_by_class(update.factors.cpu(), ranks, width)


def _from_matrices(update: DCPFLUpdate, width: int) -> dict[int, Tensor]:
    if update.covariances is None:
        raise ValueError("covariances are missing")
    update.check_shape("covariances", update.covariances, len(update.classes), width, width)
    return dict(zip(update.classes.tolist(), update.covariances.cpu(), strict=True))
