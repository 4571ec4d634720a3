"""FedKD: knowledge distillation between a teacher that stays and a student that travels in low rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_between, check_number
from pfl_lightning.client import Citation, FitContext
from pfl_lightning.encoders import EncoderFactory
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.functional import RunningAverage, compress_state, expand_state, kl_divergence
from pfl_lightning.messages import Broadcast, ClientUpdate, State, weight_field
from pfl_lightning.methods._partner import PARTNER, PartnerClient
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import Aggregator
from pfl_lightning.state.tensors import TensorDict, load_state, select_state

LEAST_DIVISOR = 1e-3
"""The distillation is divided by the sum of both cross entropies, at least by this: both fall to zero on data that are
learned by heart, and the difference of the features does not."""


@dataclass(frozen=True, kw_only=True)
class FedKDUpdate(ClientUpdate):
    """How a client's fit has changed the student.

    Attributes:
        change: Change of each tensor as :func:`~pfl_lightning.functional.compress_state` gives it: by its name, or as
            factors.
    """

    change: State = weight_field(tells="weights")


@dataclass(frozen=True)
class EnergySchedule:
    """Share of the squared norm that messages keep, round by round.

    Attributes:
        start: T_start.
        end: T_end.
    """

    start: float
    end: float

    def __post_init__(self) -> None:
        for name, energy in (("energy_start", self.start), ("energy_end", self.end)):
            check_number(f"{name}, the share of the squared norm that is kept,", energy, strict=True)
            check_between(name, energy, 0, 1)
        if self.end < self.start:
            raise ConfigurationError(
                "energy_end must be at least energy_start, as messages keep more from round to round, got "
                f"{self.end:g} after {self.start:g}"
            )

    def at(self, round: int, facts: RunFacts) -> float:
        """T(r) = T_start + (r + 1) / T (T_end - T_start), for rounds r from 0; T_start where T is unlimited."""
        passed = 0.0 if facts.num_rounds is None else min((round + 1) / facts.num_rounds, 1.0)
        return min(self.start + passed * (self.end - self.start), 1.0)


class FedKD(PartnerClient):
    """A teacher on every client, and a common student; they teach each other, the more the better both predict.

    The student travels: a client uploads how it changed, as singular vectors and values that keep a share of the
    squared norm, more of it from round to round. Evaluated is the teacher; of a client that has never trained, the
    student.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; that of the teacher. Encoders may differ where
            ``partner`` is given.
        num_classes: Number of classes, C.
        partner: Encoder of the student, the same for all clients: a registered name, or what makes one from the shape
            of a sample; ``None`` for a student like the teacher.
        distillation: Weight of what the networks learn from each other; 0 trains both on labels alone.
        detach: Whether each network takes the gradient of its own loss, with the other's outputs and the divisor as
            constants; otherwise both take that of the sum (the published implementation).
        energy_start: T_start, the share of the squared norm that is kept at first; 1 keeps all.
        energy_end: T_end, the share that is kept in the last round.
        compress_down: Whether the server sends the student in low rank, too.
        by_samples: Whether the server weighs clients by their numbers of samples; otherwise all count the same.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`, for both networks.
    """

    citation = Citation(
        "Communication-efficient federated learning via knowledge distillation",
        "Wu et al.",
        "Nature Communications",
        2022,
    )
    loss_names = (
        "cross_entropy",
        "mutual",
        "features",
        "partner_cross_entropy",
        "partner_mutual",
        "partner_features",
    )
    pair_losses = loss_names[1:]
    not_exported = (*PARTNER, "feature_map.*")

    feature_map: nn.Linear

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        partner: str | EncoderFactory | None = None,
        distillation: float = 1.0,
        detach: bool = True,
        energy_start: float = 0.95,
        energy_end: float = 0.98,
        compress_down: bool = False,
        by_samples: bool = False,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, partner=partner, **options)
        check_number("distillation", distillation)
        self.distillation, self.detach_targets = distillation, detach
        self.energy = EnergySchedule(energy_start, energy_end)
        self.compress_down, self.by_samples = compress_down, by_samples

    def take_partner(self, partner: Any) -> None:
        """Hold the student, and W_h from its features to the teacher's, which is personal."""
        super().take_partner(partner)
        self.feature_map = nn.Linear(partner.encoder.out_features, self.feature_width, bias=False)

    def receive(self, broadcast: Broadcast) -> None:
        """Take over the student."""
        load_state(self, expand_state(broadcast.weights, shapes_of(self)))

    def pair_terms(self, features: Tensor, partner_features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """L of the teacher t and of the student s, with D = CE_t + CE_s, and h the features.

        L_t = CE_t + (KL(s || t) + MSE(h_t, W_h h_s)) / D, L_s = CE_s + (KL(t || s) + MSE(h_t, W_h h_s)) / D.
        """
        teacher, student = self.classify(features), self.partner.head(partner_features)
        terms = {
            "cross_entropy": F.cross_entropy(teacher, labels),
            "partner_cross_entropy": F.cross_entropy(student, labels),
        }
        if self.distillation > 0:
            divisor = (terms["cross_entropy"] + terms["partner_cross_entropy"]).clamp(min=LEAST_DIVISOR)
            weight = self.distillation / self._target(divisor)
            mapped = self.feature_map(partner_features)
            terms["mutual"] = weight * kl_divergence(self._target(student), teacher)
            terms["features"] = weight * F.mse_loss(features, self._target(mapped))
            terms["partner_mutual"] = weight * kl_divergence(self._target(teacher), student)
            terms["partner_features"] = weight * F.mse_loss(mapped, self._target(features))
        return terms

    def _target(self, value: Tensor) -> Tensor:
        return value.detach() if self.detach_targets else value

    def before_fit(self, context: FitContext) -> dict[str, Tensor]:
        """The student as it was received."""
        return select_state(self, self.shared_names())

    def make_update(self, context: FitContext, before: dict[str, Tensor]) -> FedKDUpdate:
        """What the fit changed in the student, in low rank."""
        trained = select_state(self, before, clone=False)
        change = {name: trained[name] - received for name, received in before.items()}
        energy = self.energy.at(context.round, context.facts)
        return FedKDUpdate(**context.sender, change=compress_state(change, energy))


class FedKDAggregator(Aggregator, of=FedKD):
    """Adds the mean of the clients' changes to the student."""

    update_class = FedKDUpdate

    def __init__(self, client: FedKD, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.expected_weights = {}  # changes are sent in their place
        self.energy, self.compress_down, self.by_samples = client.energy, client.compress_down, client.by_samples
        self.shapes = shapes_of(client)
        self.weights = TensorDict(select_state(client, client.shared_names()))  # as they are sent
        self._start_round()

    def _start_round(self) -> None:
        self.running_average, self._round = RunningAverage(), 0

    def broadcast(self, client: int, round: int) -> Broadcast:
        """The student, the same for every client."""
        return Broadcast(client=client, round=round, weights=self.weights.as_state())

    def receive(self, update: FedKDUpdate) -> None:
        """Add one client's change to the running average."""
        try:
            change = expand_state(update.change, self.shapes)
        except ValueError as error:
            update.refuse(f"FedKDUpdate.change: {error}")
        self.running_average.update(change, update.num_samples if self.by_samples else 1)
        self._round = update.round

    @torch.no_grad()
    def aggregate(self) -> None:
        """Add the mean; what is sent is all that is kept, so that clients add their changes to the same student."""
        average, round = self.running_average, self._round
        self._start_round()
        if average.total_weight == 0:
            return
        sent, mean = expand_state(self.weights.as_state(), self.shapes), average.result()
        student = {name: sent[name] + mean[name].to(sent[name]) for name in sent}
        energy = self.energy.at(round, self.facts) if self.compress_down else 1.0
        self.weights.assign(compress_state(student, energy))


def shapes_of(client: FedKD) -> dict[str, torch.Size]:
    """Shape of each tensor of the student that travels."""
    return {name: t.shape for name, t in select_state(client, client.shared_names(), clone=False).items()}
