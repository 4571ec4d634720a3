"""APPLE: every client learns how much of each client's core model its own model takes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_learning_rate, check_number
from pfl_lightning.client import Batch, Citation, FederatedClient, FitContext
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.functional import scores_at
from pfl_lightning.messages import ClientUpdate
from pfl_lightning.methods._bank import BankBroadcast, row_of, stacked
from pfl_lightning.methods._cohort import CohortAggregator
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.state.client_states import ClientStates
from pfl_lightning.state.tensors import TensorDict, load_state, select_state


class APPLE(FederatedClient):
    """Core models that all clients see, and on every client its own weights of them, both trained on its loss.

    Client i has the model w_i = sum_j p_ij c_j of all core models c_j. A fit trains its own core c_i and its directed
    relationships p_i on F_i(w_i) + lambda(r) mu / 2 ||p_i - p_0||^2, with lambda(r) = (cos(pi r / L) + 1) / 2 in round
    r < L, and 0 later. p_0 is 1 / m for each of the m clients that take part, and p_i begins there.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        relationship_lr: Learning rate of p_i.
        mu: Weight of the proximal term of p_i.
        proximal_rounds: L, the rounds until that term is gone.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`. ``batch_norm``: buffers never
            travel, so that ``"shared"`` is as ``"own_statistics"``.
    """

    citation = Citation(
        "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", "Luo and Wu", "IJCAI", 2022
    )
    batch_norm = "own_statistics"
    shares_buffers = False
    loss_names = ("cross_entropy", "proximal")
    personalization_losses = ("cross_entropy",)
    not_exported = ("relationships",)

    relationships: nn.Parameter
    members: Tensor
    own: Tensor
    strength: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        relationship_lr: float = 0.001,
        mu: float = 0.1,
        proximal_rounds: int = 16,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_learning_rate("relationship_lr", relationship_lr)
        check_learning_rate("lr (relationship_lr is divided by it)", self.lr, strict=True)
        check_number("mu", mu)
        check_at_least("proximal_rounds (L)", proximal_rounds, 0)
        self.mu, self.proximal_rounds = mu, proximal_rounds
        # Steps at lr of z, with p = p_0 + scale z, are steps at relationship_lr of p.
        self.scale = math.sqrt(relationship_lr / self.lr)
        self.bank = TensorDict(persistent=False)  # the received cores
        self.register_buffer("members", torch.zeros(0, dtype=torch.int64), persistent=False)  # whose they are
        self.register_buffer("own", torch.zeros(0), persistent=False)  # 1 for the client's own core, 0 for the others
        self.register_buffer("strength", torch.zeros(()), persistent=False)  # lambda(r) mu

    def configure_aggregator(self, num_clients: int) -> APPLEAggregator:
        """The server of APPLE; only now it is known how many relationships a client has."""
        self.relationships = nn.Parameter(self.statistics_like().detach().new_zeros(num_clients))  # z_i, personal
        return APPLEAggregator(self, num_clients)

    def check_run(self, facts: RunFacts) -> None:
        """Refuse several encoders, be they alike."""
        if not hasattr(self, "relationships"):
            raise ConfigurationError("APPLE mixes models of one encoder, got several: give one encoder for all clients")

    def receive(self, broadcast: BankBroadcast) -> None:
        """Hold all cores, and take over the own one."""
        self.bank.assign(broadcast.bank)
        self.members = broadcast.members
        self.own = (self.members == broadcast.client).to(self.relationships.dtype)
        if self.own.any():  # a novel client has none
            load_state(self, row_of(broadcast.bank, int(self.own.argmax())))

    def before_fit(self, context: FitContext) -> None:
        """Set lambda(r) mu."""
        fading = context.round < self.proximal_rounds
        weight = (math.cos(math.pi * context.round / self.proximal_rounds) + 1) / 2 if fading else 0.0
        self.strength = torch.full_like(self.strength, weight * self.mu)

    def before_evaluation(self, context: FitContext) -> None:
        """The client's model takes the place of its core."""
        load_state(self, self.mixture())

    def _moved(self) -> Tensor:
        """p_i - p_0, (j,)."""
        return self.scale * self.relationships[self.members]

    def mixture(self) -> dict[str, Tensor]:
        """w_i = sum_j p_ij c_j, in which the own core and p_i train."""
        p = 1 / len(self.members) + self._moved()
        others, share, cores = p * (1 - self.own), (p * self.own).sum(), dict(self.named_parameters())
        bank = self.bank.as_state()
        return {name: torch.tensordot(others, bank[name], dims=1) + share * cores[name] for name in bank}

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """F_i(w_i) + lambda(r) mu / 2 ||p_i - p_0||^2; in a fine-tuning of w_i its loss alone."""
        if not self.uses("proximal"):
            return super().training_step(batch, batch_idx)
        inputs, labels = batch[:2]
        scores = scores_at(self, self.mixture(), inputs, own_buffers=True)
        proximal = self.strength / 2 * self._moved().square().sum()
        return self.sum_of_terms({"cross_entropy": F.cross_entropy(scores, labels), "proximal": proximal})


class APPLEAggregator(CohortAggregator):
    """Keeps every client's core, and sends all of them."""

    def __init__(self, client: APPLE, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.cores = ClientStates(select_state(client, client.shared_names()), num_clients)

    def broadcast(self, client: int, round: int) -> BankBroadcast:
        """The cores of all clients that take part, the same for every client."""
        members = [other for other in range(self.num_clients) if other not in self.facts.novel]
        bank = stacked([self.cores.get(other) for other in members])
        return BankBroadcast(client=client, round=round, bank=bank, members=torch.tensor(members))

    def combine(self, cohort: list[ClientUpdate]) -> None:
        """Take over the cores of the cohort."""
        for update in cohort:
            self.cores.set(update.client, update.weights)
