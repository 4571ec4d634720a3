"""Class means as messages, received class means, and a head that is trained on them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.client import FederatedClient, FitContext
from pfl_lightning.errors import ClientError, ConfigurationError
from pfl_lightning.functional import ClassStatistics
from pfl_lightning.functional.tensor_lists import HOST, moved
from pfl_lightning.learner import all_finite, warn_of_taken_back
from pfl_lightning.messages import Broadcast, ClientUpdate, statistics_field
from pfl_lightning.server import Aggregator
from pfl_lightning.state.tensors import TensorDict, select_state


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

    classes: Tensor = statistics_field(
        shape="K", dtype=torch.int64, at_least=0, below="C", ascending=True, tells="label presence"
    )
    means: Tensor = statistics_field(shape="K d", floating=True, tells="class means")
    counts: Tensor = statistics_field(
        shape="K", dtype=torch.int64, at_least=1, total="num_samples", tells="class counts"
    )


class ReceivedMeans(TensorDict):
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
        state = {"means": torch.zeros(num_classes, width), "present": torch.zeros(num_classes, dtype=torch.bool)}
        super().__init__(state, persistent=persistent)

    def take(self, means: Tensor, classes: Tensor) -> None:
        """Replace the content by the means (K, d) of some classes (K,)."""
        present = torch.zeros_like(self.present)
        present[classes] = True
        self.assign({"means": spread(means.to(self.means), classes, len(self.means)), "present": present})


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
    # On the host: their many small steps in double precision would each wait for a GPU.
    features, labels = moved(client.features_of(context.data), HOST)
    check_finite(features, context)
    statistics = ClassStatistics(client.num_classes, features.shape[1], with_covariances)
    statistics.update(features, labels)
    return statistics


def class_means_update(client: FederatedClient, context: FitContext) -> ClassMeansUpdate:
    """Class means of the client's training data at its current encoder, to be uploaded."""
    statistics = class_statistics(client, context)
    classes = statistics.counts.nonzero().flatten()
    return ClassMeansUpdate(
        **context.sender,
        classes=classes,
        means=statistics.means[classes].to(client.statistics_like().dtype),
        counts=statistics.counts[classes],
    ).to(client.statistics_like().device)


def spread(rows: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Rows (K, ...) of some classes as rows of all, (C, ...); the others are zero."""
    result = rows.new_zeros(num_classes, *rows.shape[1:])
    result[classes] = rows
    return result


class HeadAggregator(Aggregator):
    """Server that trains the head by gradient descent on class means, from client to client; no client uploads a head.

    Steps change a copy: the head that is sent changes between rounds.

    Args:
        client: See :class:`~pfl_lightning.server.Aggregator`; its ``server_lr`` is the length of a step.
        num_clients: Number of clients, m.

    Raises:
        ConfigurationError: It has batch normalization, whose statistics the server has no samples for, or none train.
    """

    update_class = ClassMeansUpdate

    def __init__(self, client: Any, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.expected_weights = {}  # clients upload class statistics, and not the head
        self.lr, self._prefix = client.server_lr, client.head_prefix
        self.head = client.copy_head()
        if any(isinstance(layer, nn.modules.batchnorm._NormBase) for layer in self.head.modules()):
            raise ConfigurationError(
                f"the server of {type(client).__name__} trains the head on class means, and batch normalization has no "
                "statistics there: make only the last linear layer the head, or use another method, such as FedPAC"
            )
        shared = set(client.shared_names())
        self._names = [name for name, _ in self.head.named_parameters() if f"{self._prefix}{name}" in shared]
        if not self._names:
            raise ConfigurationError(
                f"the server of {type(client).__name__} trains the head, but all of it is frozen (requires_grad=False)"
            )
        self._next: tuple[nn.Module, ...] = ()  # at most one; in a tuple, it is no part of the state that is saved
        self._round = 0

    def head_weights(self) -> dict[str, Tensor]:
        """What is shared of the head, by the clients' names."""
        return {f"{self._prefix}{name}": value for name, value in select_state(self.head, self._names).items()}

    def takes_mean(self) -> bool:
        """Return whether one update may stand for the mean of a cohort, which it may."""
        return True

    def receive(self, update: Any) -> None:
        """Begin the next head with the first update of a round."""
        if not self._next:
            self._next = (copy.deepcopy(self.head),)
        self._round = update.round

    @torch.enable_grad()
    def descend(self, features: Tensor, labels: Tensor) -> None:
        """One step of the next head on the mean cross entropy of features (N, d)."""
        [head] = self._next
        parameters = [head.get_parameter(name).requires_grad_() for name in self._names]
        with torch.autocast(parameters[0].device.type, enabled=False):
            loss = F.cross_entropy(head(features.to(parameters[0])), labels.to(parameters[0].device))
            gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.requires_grad_(False).sub_(self.lr * gradient)

    def aggregate(self) -> None:
        """Take over the next head, unless it is not finite."""
        for head in self._next:
            if all_finite(head.parameters()):
                self.head = head
            else:
                remedy = "lower server_lr, or look for clients whose class statistics are very large"
                warn_of_taken_back("the server's head", self._round, remedy)
        self._next, self._round = (), 0
