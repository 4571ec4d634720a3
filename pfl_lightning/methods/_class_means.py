"""Class means as messages, received class means, and a head that is trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.errors import ClientError, ConfigurationError
from pfl_lightning.functional import ClassStatistics
from pfl_lightning.learner import all_finite, warn_of_taken_back
from pfl_lightning.messages import Broadcast, ClientUpdate, statistics_field

__all__ = [
    "ClassMeansBroadcast",
    "ClassMeansUpdate",
    "ReceivedMeans",
    "check_finite",
    "class_means_update",
    "class_statistics",
    "descend",
    "finite_features",
    "finite_or_before",
    "server_head",
    "spread",
]


@dataclass(frozen=True, kw_only=True)
class ClassMeansBroadcast(Broadcast):
    """Weights, and the global mean of every class that has one.

    Attributes:
        classes: Classes with a global mean, (K,), int64, ascending.
        means: Their means, (K, d).
    """

    classes: Tensor = statistics_field(shape="K", dtype=torch.int64, at_least=0, below="C")
    means: Tensor = statistics_field(shape="K d", floating=True)


@dataclass(frozen=True, kw_only=True)
class ClassMeansUpdate(ClientUpdate):
    """Class means of a client's features at its trained encoder, of the classes that it has; no weights.

    Attributes:
        classes: Classes of the client, (K,), int64, ascending.
        means: Their means, (K, d).
        counts: Their numbers of samples, n_kc, (K,), int64.
    """

    classes: Tensor = statistics_field(shape="K", dtype=torch.int64, at_least=0, below="C", ascending=True)
    means: Tensor = statistics_field(shape="K d", floating=True)
    counts: Tensor = statistics_field(shape="K", dtype=torch.int64, at_least=1, total="num_samples")


class ReceivedMeans(nn.Module):
    """Global class means that a client has received, for its loss; they are neither stored nor shared.

    Args:
        num_classes: Number of classes, C.
        width: Width of the features, d.
        persistent: Whether they are stored after all: means of the client's own.

    Attributes:
        means: Class means, (C, d); zero for classes without.
        present: Classes that have a mean, (C,), bool.
    """

    means: Tensor
    present: Tensor

    def __init__(self, num_classes: int, width: int, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(num_classes, width), persistent=persistent)
        self.register_buffer("present", torch.zeros(num_classes, dtype=torch.bool), persistent=persistent)

    def assign(self, means: Tensor, classes: Tensor) -> None:
        """Replace the content by the means (K, d) of some classes (K,)."""
        self.means.copy_(spread(means, classes, len(self.means)))
        self.present.fill_(False)[classes] = True


def finite_features(client: FederatedClient, context: FitContext) -> tuple[Tensor, Tensor]:
    """Features (n, d) and labels (n,) of the client's training data at its current encoder, not augmented.

    Raises:
        ClientError: The features are not finite.
    """
    features, labels = client.features_of(context.data)
    check_finite(features, context)
    return features, labels


def check_finite(features: Tensor, context: FitContext) -> None:
    """Refuse features of a client's training data that are not finite.

    Raises:
        ClientError: They are not.
    """
    if not bool(torch.isfinite(features).all()):
        raise ClientError(
            context.client,
            context.round,
            "the encoder's features are not finite; look at this client's data for NaN, "
            "lower the learning rate or clip the gradient",
        )


def class_statistics(client: FederatedClient, context: FitContext, with_covariances: bool = False) -> ClassStatistics:
    """Class statistics of the client's training data at its current encoder.

    Raises:
        ClientError: The features are not finite.
    """
    features, labels = finite_features(client, context)
    statistics = ClassStatistics(client.num_classes, features.shape[1], with_covariances)
    statistics.update(features, labels)
    return statistics


def class_means_update(client: FederatedClient, context: FitContext) -> ClassMeansUpdate:
    """Class means of the client's training data at its current encoder, to be uploaded."""
    statistics = class_statistics(client, context)
    classes = statistics.counts.nonzero().flatten()
    return ClassMeansUpdate(
        client=context.client,
        round=context.round,
        num_samples=context.data.num_samples,
        classes=classes,
        means=statistics.means[classes].to(client.statistics_like()),
        counts=statistics.counts[classes],
    )


def spread(rows: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Rows (K, ...) of some classes as rows of all, (C, ...); the others are zero."""
    result = rows.new_zeros(num_classes, *rows.shape[1:])
    result[classes] = rows
    return result


def server_head(client: FederatedClient) -> tuple[Any, list[str]]:
    """A copy of the head, for a server that trains it on class means, and the names of its parameters that train.

    Raises:
        ConfigurationError: It has batch normalization, whose statistics the server has no samples for, or none train.
    """
    head = client.copy_head()
    if any(isinstance(layer, nn.modules.batchnorm._NormBase) for layer in head.modules()):
        raise ConfigurationError(
            f"the server of {type(client).__name__} trains the head on class means, and batch normalization has no "
            "statistics there: let the head be the last linear layer alone, or use another method, such as FedPAC"
        )
    shared = set(client.shared_names())
    names = [name for name, _ in head.named_parameters() if f"{client.head_prefix}{name}" in shared]
    if not names:
        raise ConfigurationError(
            f"the server of {type(client).__name__} trains the head, and all of it is frozen (requires_grad=False)"
        )
    return head, names


@torch.enable_grad()
def descend(head: nn.Module, features: Tensor, labels: Tensor, lr: float, names: Sequence[str]) -> None:
    """One step of gradient descent of a head, in place, on the mean cross entropy of features (N, d).

    Args:
        head: The head, see :func:`server_head`.
        features: Features (N, d).
        labels: Their classes, (N,).
        lr: Learning rate.
        names: Names of the parameters that train.
    """
    parameters = [head.get_parameter(name).requires_grad_() for name in names]
    loss = F.cross_entropy(head(features), labels)
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.requires_grad_(False).sub_(lr * gradient)


def finite_or_before(new: nn.Linear, before: nn.Linear, round: int) -> nn.Linear:
    """Trained head of the server, or the one before, with a warning, where it is not finite."""
    if all_finite(new.parameters()):
        return new
    remedy = "lower server_lr, or look for clients whose class statistics are very large"
    warn_of_taken_back("the server's head", round, remedy, stacklevel=4)
    return before
