"""FedNova: clients that take unequal numbers of steps, averaged by their normalized directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.functional import RunningAverage
from pfl_lightning.messages import ClientUpdate, statistics_field
from pfl_lightning.methods._gradients import check_steps_of_sgd, steps_in_gradients
from pfl_lightning.server import AveragingAggregator

PURPOSE, ALTERNATIVE = "FedNova takes the number of gradients", "use FedAvg"


@dataclass(frozen=True, kw_only=True)
class FedNovaUpdate(ClientUpdate):
    """The trained model, and how many gradients its steps add up to.

    Attributes:
        norm: ||a_k||_1, a scalar.
    """

    norm: Tensor = statistics_field(shape="", at_least=1, tells="amount of work")


class FedNova(FederatedClient):
    """FedAvg in which a client that takes more steps does not pull the global model further to its own optimum.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
        "Wang et al.",
        "NeurIPS",
        2020,
    )
    batch_norm = "shared"

    def check_run(self, facts: RunFacts) -> None:
        """Refuse local steps that are no steps of plain SGD, whose number says nothing."""
        check_steps_of_sgd(self, PURPOSE, ALTERNATIVE)

    def make_update(self, context: FitContext, before: Any) -> FedNovaUpdate:
        """The trained model and ||a_k||_1; of a fit whose steps were all skipped, one."""
        norm = steps_in_gradients(max(context.num_steps, 1), self.momentum)
        return FedNovaUpdate(**vars(super().make_update(context, before)), norm=torch.tensor(float(norm)))


class FedNovaAggregator(AveragingAggregator, of=FedNova):
    """w - tau_eff sum_k p_k (w - w_k) / ||a_k||_1 with tau_eff = sum_k p_k ||a_k||_1 (7); statistics are averaged."""

    update_class = FedNovaUpdate
    averages = True

    def __init__(self, client: FedNova, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self._directions, self._norms = RunningAverage(), RunningAverage()  # of this round

    def receive(self, update: FedNovaUpdate) -> None:
        """Add one client's model, normalized direction and norm to the averages."""
        sent = self.weights.as_state()
        direction = {n: (sent[n] - w) / update.norm for n, w in update.weights.items() if n in self.parameter_names}
        if direction:
            self._directions.update(direction, update.num_samples)
            self._norms.update({"norm": update.norm}, update.num_samples)
        super().receive(update)

    def aggregate(self) -> None:
        """Go tau_eff times the mean direction; buffers take their mean."""
        directions, self._directions = self._directions, RunningAverage()
        norms, self._norms = self._norms, RunningAverage()
        if directions.total_weight > 0:
            sent, tau, mean = self.weights.as_state(), norms.result()["norm"], self.running_average.result()
            moved = {name: sent[name] - tau * direction for name, direction in directions.result().items()}
            self.running_average = RunningAverage()
            self.running_average.update({**mean, **moved}, 1)  # in the place of the mean
        super().aggregate()
