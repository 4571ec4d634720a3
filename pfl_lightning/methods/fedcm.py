"""FedCM: the direction of all clients in each client's steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.functional import RunningAverage
from pfl_lightning.functional.losses import linear_term
from pfl_lightning.messages import Broadcast, ClientUpdate, State, statistics_field, weight_field
from pfl_lightning.methods._gradients import check_steps_of_sgd, steps_in_gradients
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import AveragingAggregator
from pfl_lightning.state.tensors import TensorDict

PURPOSE, ALTERNATIVE = "FedCM takes the mean of the gradients", 'use SCAFFOLD with control="gradient"'


@dataclass(frozen=True, kw_only=True)
class FedCMBroadcast(Broadcast):
    """The global model and the server's momentum.

    Attributes:
        momentum: Delta, by parameter name.
    """

    momentum: State = weight_field()


@dataclass(frozen=True, kw_only=True)
class FedCMUpdate(ClientUpdate):
    """The trained model, and how many gradients its steps add up to.

    Attributes:
        steps: a_K, K for SGD without momentum, a scalar.
    """

    steps: Tensor = statistics_field(shape="", at_least=1, tells="amount of work")


class FedCM(FederatedClient):
    """FedAvg in which local steps are mixed with the mean direction of the round before.

    A local step goes along alpha g + (1 - alpha) Delta, where g is the gradient of the batch and Delta the mean of the
    directions in which the last cohort went.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        alpha: Weight of the batch's own gradient in a step, above 0 and at most 1; 1 is FedAvg with a plain mean.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation("FedCM: Federated Learning with Client-level Momentum", "Xu et al.", "arXiv", 2021)
    batch_norm = "shared"
    averages_samples = True
    loss_names = ("cross_entropy", "momentum")
    personalization_losses = ("cross_entropy",)

    def __init__(
        self, encoder: nn.Module, num_classes: int, *, alpha: float = 0.1, **options: Unpack[ClientOptions]
    ) -> None:
        check_number("alpha", alpha, strict=True)
        if alpha > 1:
            raise ConfigurationError(f"alpha, the weight of a batch's own gradient, must be at most 1, got {alpha}")
        super().__init__(encoder, num_classes, **options)
        self.alpha = alpha
        self.received = TensorDict(persistent=False)  # w^t, for the time of a fit
        self.push = TensorDict(persistent=False)  # (1 - alpha) Delta, received with each broadcast

    def check_run(self, facts: RunFacts) -> None:
        """Refuse local steps of another kind, of which Delta would be no mean of gradients."""
        check_steps_of_sgd(self, PURPOSE, ALTERNATIVE)

    def receive(self, broadcast: FedCMBroadcast) -> None:
        """Take over the global model and the momentum."""
        super().receive(broadcast)
        own = dict(self.named_parameters())  # a copy of w^t in their memory layout, which steps are quicker with
        self.received.assign({name: own[name].detach().clone() for name in broadcast.momentum})
        self.push.assign({name: (1 - self.alpha) * delta for name, delta in broadcast.momentum.items()})

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss alpha F(w) + (1 - alpha) <Delta, w - w^t>, whose gradient is alpha g + (1 - alpha) Delta."""
        terms = super().loss_terms(features, labels)
        if self.uses("momentum"):
            terms["cross_entropy"] = self.alpha * terms["cross_entropy"]
            terms["momentum"] = linear_term(
                dict(self.named_parameters()), self.received.as_state(), self.push.as_state()
            )
        return terms

    def make_update(self, context: FitContext, before: Any) -> FedCMUpdate:
        """The trained model and a_K; of a fit whose steps were all skipped, one."""
        steps = steps_in_gradients(max(context.num_steps, 1), self.momentum)
        return FedCMUpdate(**vars(super().make_update(context, before)), steps=torch.tensor(float(steps)))


class FedCMAggregator(AveragingAggregator, of=FedCM):
    """The plain mean of the models, and Delta, the mean of (w^t - w_k) / (a_K eta_l)."""

    update_class = FedCMUpdate
    averages = True

    def __init__(self, client: FedCM, num_clients: int) -> None:
        super().__init__(client, num_clients, by_samples=False)
        self.lr = client.lr
        shared = self.weights.as_state()
        self.momentum = TensorDict({n: torch.zeros_like(w) for n, w in shared.items() if n in self.parameter_names})
        self._directions = RunningAverage()  # of this round

    def broadcast(self, client: int, round: int) -> FedCMBroadcast:
        """The global model and the momentum, the same for every client."""
        return FedCMBroadcast(**vars(super().broadcast(client, round)), momentum=self.momentum.as_state())

    def receive(self, update: FedCMUpdate) -> None:
        """Add one client's model and direction to the averages."""
        sent, scale = self.weights.as_state(), self.lr * float(update.steps)
        self._directions.update({n: (sent[n] - update.weights[n]) / scale for n in self.momentum.as_state()}, 1)
        super().receive(update)

    def aggregate(self) -> None:
        """Take over both means."""
        directions, self._directions = self._directions, RunningAverage()
        if directions.total_weight > 0:
            self.momentum.assign(directions.result())
        super().aggregate()
