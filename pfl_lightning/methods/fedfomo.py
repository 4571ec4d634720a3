"""FedFomo: every client weighs other clients' models by what they gain on its own validation samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_at_least, check_between, check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.functional import weighted_average
from pfl_lightning.functional.numerics import in_double
from pfl_lightning.messages import ClientUpdate, State, statistics_field
from pfl_lightning.methods._bank import BankBroadcast, mean_loss, row_of, stacked
from pfl_lightning.methods._cohort import CohortAggregator
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.seeding import Purpose, seeded_generator
from pfl_lightning.state.client_states import ClientStates
from pfl_lightning.state.tensors import TensorDict, load_state, select_state

LEAST = 1e-9
"""Added to a sum of gains below it, by which they are divided."""


@dataclass(frozen=True, kw_only=True)
class FedFomoUpdate(ClientUpdate):
    """The trained model, and what the compared models have gained or lost.

    Attributes:
        members: Clients whose models were compared, its own first, (j,).
        gains: What each gains, (j,), below 0 for a loss, see :meth:`FedFomo.gain`.
    """

    members: Tensor = statistics_field(shape="j", dtype=torch.int64, at_least=0, below="m", tells="choice")
    gains: Tensor = statistics_field(shape="j", floating=True, tells="quality of fit")


class FedFomo(FederatedClient):
    """Personal models; before a fit a client moves towards those models that do better on its validation samples.

    It needs a validation part of every client (``validation_share`` of the data module). There is no global model: a
    client is evaluated with its own after its last fit.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        models: Models that a client compares in a round, its own included, M.
        exploration: Probability that a place is given to a random client in the first round, epsilon.
        exploration_decay: What it falls by in each round.
        fallback: Model that a client continues from where none gains: its ``"own"``, or the one from before its last
            fit, ``"base"`` (published implementation).
        preference: What the server adds up for each pair of clients, losses with their minus: ``"raw"`` gains, or
            ``"normalized"`` ones, divided by the absolute value of their sum (published implementation).
        distance: What a model's gain is divided by: its ``"euclidean"`` distance to the base, or the ``"l1"`` one, the
            sum of absolute differences (published implementation).
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "Personalized Federated Learning with First Order Model Optimization", "Zhang et al.", "ICLR", 2021
    )
    batch_norm = "shared"
    eval_model = "trained"
    eval_models = ("trained",)  # there is no global model
    needs_validation = True
    not_exported = ("base.*",)

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        models: int = 5,
        exploration: float = 0.3,
        exploration_decay: float = 0.05,
        fallback: str = "own",
        preference: str = "raw",
        distance: str = "euclidean",
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_at_least("models (M)", models, 1)
        check_between("exploration (epsilon)", exploration, 0, 1)
        check_number("exploration_decay", exploration_decay)
        check_choice("fallback", fallback, ("own", "base"))
        check_choice("preference", preference, ("raw", "normalized"))
        check_choice("distance", distance, ("euclidean", "l1"))
        self.models, self.exploration, self.exploration_decay = models, exploration, exploration_decay
        self.fallback, self.preference, self.distance = fallback, preference, distance
        self.base = TensorDict(select_state(self, self.shared_names()))  # the own model before the last fit
        self.bank = TensorDict(persistent=False)  # received models, until they are compared
        self.register_buffer("members", torch.zeros(0, dtype=torch.int64), persistent=False)  # whose they are
        self.members: Tensor

    def receive(self, broadcast: BankBroadcast) -> None:
        """Hold others' models; the own one stays as it is."""
        self.bank.assign(broadcast.bank)
        self.members = broadcast.members

    def before_fit(self, context: FitContext) -> tuple[Tensor, Tensor]:
        """Combine the models that gain, and return whose were compared and what they gain."""
        assert context.validation is not None  # by needs_validation
        base, bank, names = self.base.as_state(), self.bank.as_state(), self.shared_names()
        own = select_state(self, names)
        candidates: list[State] = [own, *(row_of(bank, row) for row in range(len(self.members)))]
        losses = []
        for state in (base, *candidates):
            load_state(self, state)
            losses.append(mean_loss(self, context.validation))
        gains = [self.gain(losses[0], loss, state) for loss, state in zip(losses[1:], candidates, strict=True)]
        weights = [max(0.0, gain) for gain in gains]  # w_j
        total = sum(weights)
        if total > 0:  # base + sum_j w_j (theta_j - base), with weights that sum to one
            load_state(self, weighted_average(candidates, [weight / total for weight in weights]))
        else:
            load_state(self, own if self.fallback == "own" else base)
        self.base.assign(select_state(self, names))
        compared = torch.tensor([context.client, *self.members.tolist()])
        self.bank.assign({})
        self.members = self.members[:0]
        return compared, torch.tensor(gains, dtype=torch.float64).to(self.statistics_like().dtype)

    def gain(self, before: float, loss: float, state: State) -> float:
        """(L(base) - L(theta_j)) / ||theta_j - base||: how much the loss falls on the way there; 0 if not finite."""
        base, l1 = self.base.as_state(), self.distance == "l1"
        changes = [in_double(state[n].to(base[n]) - base[n]) for n, _ in self.named_parameters() if n in base]
        moved = float(torch.stack([change.abs().sum() if l1 else change.square().sum() for change in changes]).sum())
        gained = (before - loss) / ((moved if l1 else math.sqrt(moved)) + 1e-5)
        return gained if math.isfinite(gained) else 0.0

    def make_update(self, context: FitContext, before: tuple[Tensor, Tensor]) -> FedFomoUpdate:
        """The trained model, and what the compared ones have gained or lost."""
        update = super().make_update(context, before)
        return FedFomoUpdate(**vars(update), members=before[0], gains=before[1])


class FedFomoAggregator(CohortAggregator, of=FedFomo):
    """Keeps every client's last model and what each has gained by which, and picks the models to send by that.

    P is the identity at first. Entries are kept where a client has compared a model, so that memory grows with
    comparisons and not with the square of the number of clients.

    The models of a round are held until its end, so that all clients of a round get those of the round before.
    """

    update_class = FedFomoUpdate

    def __init__(self, client: FedFomo, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.num_models, self.normalized = client.models, client.preference == "normalized"
        self.exploration, self.decay = client.exploration, client.exploration_decay
        self.models = ClientStates(select_state(client, client.shared_names()), num_clients)
        # P, row by row: of entry (k, j) the place k m + j, ascending, and the sum.
        self.preferences = TensorDict({"places": torch.zeros(0, dtype=torch.int64), "sums": torch.zeros(0)})
        self.last_cohort = TensorDict({"clients": torch.zeros(0, dtype=torch.int64)})  # ascending

    def broadcast(self, client: int, round: int) -> BankBroadcast:
        """M - 1 models of other clients of the last cohort; none before the first aggregation."""
        chosen = self.choose(client, round)
        bank = stacked([self.models.get(other) for other in chosen]) if chosen else {}
        return BankBroadcast(client=client, round=round, bank=bank, members=torch.tensor(chosen, dtype=torch.int64))

    @staticmethod
    def idle_broadcast(*, client: int, round: int) -> BankBroadcast:
        """No models, for the evaluation of the client's own."""
        return BankBroadcast(client=client, round=round, bank={}, members=torch.zeros(0, dtype=torch.int64))

    def choose(self, client: int, round: int) -> Sequence[int]:
        """Clients by what they have gained so far, ties at random; each place is random with probability epsilon."""
        others = [other for other in self.last_cohort.as_state()["clients"].tolist() if other != client]
        generator = seeded_generator(self.seed, Purpose.FOMO_MODELS, round, client)
        shuffled = [others[place] for place in torch.randperm(len(others), generator=generator).tolist()]
        gained = self.gained_by(client)
        best = sorted(shuffled, key=lambda other: -gained.get(other, 0.0))
        at_random = [others[place] for place in torch.randperm(len(others), generator=generator).tolist()]
        epsilon, chosen = self.exploration - self.decay * round, list[int]()
        for draw in torch.rand(min(self.num_models - 1, len(others)), generator=generator).tolist():
            chosen.append(next(o for o in (at_random if draw < epsilon else best) if o not in chosen))
        return chosen

    def gained_by(self, client: int) -> dict[int, float]:
        """Entries of the client's row of P, by the other client; the others are those of the identity."""
        places, sums = (self.preferences.as_state()[name] for name in ("places", "sums"))
        start = client * self.num_clients
        ends = torch.tensor([start, start + self.num_clients], device=places.device)
        first, end = torch.searchsorted(places, ends).tolist()
        return dict(zip((places[first:end] - start).tolist(), sums[first:end].tolist(), strict=True))

    def combine(self, cohort: list[FedFomoUpdate]) -> None:
        """Take over the models, and add the gains to P."""
        sums, found, gains = self.preferences.as_state()["sums"], list[Tensor](), list[Tensor]()
        self.last_cohort.assign({"clients": torch.tensor(sorted(update.client for update in cohort)).to(sums.device)})
        for update in cohort:
            self.models.set(update.client, update.weights)
            found.append(update.client * self.num_clients + update.members.to(sums.device))
            gained, total = update.gains.to(sums), update.gains.to(sums).sum().abs()
            gains.append(gained / torch.where(total < LEAST, total + LEAST, total) if self.normalized else gained)
        self._add(torch.cat(found), torch.cat(gains))

    def _add(self, found: Tensor, gains: Tensor) -> None:
        """Add gains to entries of P, given by their places."""
        places, sums = (self.preferences.as_state()[name] for name in ("places", "sums"))
        known = torch.cat([places, found]).unique()  # ascending
        grown = (known % (self.num_clients + 1) == 0).to(sums)  # the diagonal of the identity
        grown[torch.searchsorted(known, places)] = sums
        grown[torch.searchsorted(known, found)] += gains
        self.preferences.assign({"places": known, "sums": grown})
