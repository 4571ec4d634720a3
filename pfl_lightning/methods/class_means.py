"""What methods with class statistics share: clients upload class means, the server may train a head on them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.errors import ClientError, InvalidMessageError
from pfl_lightning.functional import ClassStatistics
from pfl_lightning.messages import Broadcast, ClientUpdate, statistics_field

__all__ = [
    "ClassMeansBroadcast",
    "ClassMeansUpdate",
    "check_class_means",
    "class_means_update",
    "class_statistics",
    "descend",
    "finite_features",
    "finite_or_before",
    "spread",
]


@dataclass(frozen=True, kw_only=True)
class ClassMeansBroadcast(Broadcast):
    """Weights, and the global mean of every class that has one.

    Attributes:
        means: Global class means, (K, d).
        classes: Their classes, (K,), int64.
    """

    means: Tensor = statistics_field()
    classes: Tensor = statistics_field()


@dataclass(frozen=True, kw_only=True)
class ClassMeansUpdate(ClientUpdate):
    """Class means of a client's features at its trained encoder, of the classes that it has.

    Attributes:
        means: Class means, (K, d).
        classes: Their classes, (K,), int64, ascending.
        counts: Samples of each, n_kc, (K,), int64.
    """

    means: Tensor = statistics_field()
    classes: Tensor = statistics_field()
    counts: Tensor = statistics_field()


def finite_features(client: FederatedClient, context: FitContext) -> tuple[Tensor, Tensor]:
    """Features (n, d) and labels (n,) of the client's training data at its encoder as it is, not augmented.

    Raises:
        ClientError: The features are not finite.
    """
    features, labels = context.data.features(client.encoder)
    if not bool(torch.isfinite(features).all()):
        raise ClientError(
            context.client,
            context.round,
            "the encoder's features are not finite; look at this client's data for NaN, "
            "lower the learning rate or clip the gradient",
        )
    return features, labels


def class_statistics(client: FederatedClient, context: FitContext, with_covariances: bool = False) -> ClassStatistics:
    """Class statistics of the client's training data at its encoder as it is.

    Raises:
        ClientError: The features are not finite.
    """
    features, labels = finite_features(client, context)
    statistics = ClassStatistics(client.num_classes, features.shape[1], with_covariances)
    statistics.update(features, labels)
    return statistics


def class_means_update(client: FederatedClient, context: FitContext) -> ClassMeansUpdate:
    """Class means of the client's training data at its encoder as it is, to be uploaded."""
    statistics = class_statistics(client, context)
    classes = statistics.counts.nonzero().flatten()
    return ClassMeansUpdate(
        client=context.client,
        round=context.round,
        num_samples=context.data.num_samples,
        means=statistics.means[classes].to(client.head.weight),
        classes=classes,
        counts=statistics.counts[classes],
    )


def check_class_means(update: ClientUpdate, num_classes: int, width: int) -> ClassMeansUpdate:
    """Refuse class means that are misshapen, non-finite, or of classes that do not exist.

    Raises:
        InvalidMessageError: Names the client, the round and the field.
    """
    assert isinstance(update, ClassMeansUpdate)
    classes, known = update.classes, update.classes.numel()
    update.check_shape("classes", classes, known)
    update.check_shape("means", update.means, known, width)
    update.check_shape("counts", update.counts, known)
    for name, numbers in (("classes", classes), ("counts", update.counts)):
        if numbers.dtype != torch.int64:
            reason = f"{type(update).__name__}.{name} has dtype {numbers.dtype}, expected torch.int64"
            raise InvalidMessageError(update.client, update.round, reason)
    update.check_finite()
    update.check_size()
    ascending = bool((classes[1:] > classes[:-1]).all())
    if known == 0 or not ascending or int(classes.min()) < 0 or int(classes.max()) >= num_classes:
        reason = f"classes are {classes.tolist()}, expected ascending classes of 0 to {num_classes - 1}"
        raise InvalidMessageError(update.client, update.round, reason)
    if int(update.counts.min()) < 1:
        reason = f"counts are {update.counts.tolist()}, expected at least 1 sample of each class that is sent"
        raise InvalidMessageError(update.client, update.round, reason)
    return update


def spread(rows: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Rows (K, ...) of some classes as rows of all, (C, ...); the others are zero."""
    result = rows.new_zeros(num_classes, *rows.shape[1:])
    result[classes] = rows
    return result


@torch.enable_grad()
def descend(head: nn.Module, features: Tensor, labels: Tensor, lr: float) -> None:
    """One step of gradient descent of a head, in place, on the mean cross entropy of features (N, d)."""
    parameters = [parameter.requires_grad_() for parameter in head.parameters()]
    loss = F.cross_entropy(head(features), labels)
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.requires_grad_(False).sub_(lr * gradient)


def finite_or_before(new: nn.Linear, before: nn.Linear, round: int) -> nn.Linear:
    """The head that the server has trained; the one before where it is not finite, with a warning."""
    if all(bool(torch.isfinite(parameter).all()) for parameter in new.parameters()):
        return new
    warnings.warn(
        f"round {round}: the server's head became non-finite and stays as it was; lower server_lr, "
        "or look for clients whose class statistics are very large",
        stacklevel=3,
    )
    return before
