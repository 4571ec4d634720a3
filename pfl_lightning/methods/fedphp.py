"""FedPHP: private models that a client inherits from round to round."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_at_least, check_between, check_choice, check_number
from pfl_lightning.client import Batch, Citation, FederatedClient, FitContext, Phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.functional.losses import maximum_mean_discrepancy
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.options import ClientOptions, Unpack


class FedPHP(FederatedClient):
    """A global model as in FedAvg, taught on every client by the client's own models of earlier rounds.

    A client keeps a private model, the moving average of what its local fits ended with. In the next fit it teaches the
    received model, which has forgotten the client; it is also what the client is evaluated with. A client that has
    never trained has the received model in its place.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        mu: Weight of the earlier private model in the moving average at the end, in [0, 1]; it grows from 0.
        rounds: Rounds in which it grows, T; ``None`` takes the planned number of rounds.
        lam: lambda, the weight of what the private model teaches, in [0, 1]; the cross entropy has the rest.
        transfer: What it teaches: ``"mmd"`` the distribution of a batch's features, or ``"kd"`` the probabilities of
            classes.
        temperature: By which the private model's scores are divided in ``"kd"``.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "FedPHP: Federated Personalization with Inherited Private Models", "Li et al.", "ECML PKDD", 2021
    )
    shared = ("global_model.*",)
    batch_norm = "shared"
    loss_names = ("cross_entropy", "transfer")
    personalization_losses = ("cross_entropy",)
    not_exported = ("global_model.*", "started")

    started: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        mu: float = 0.9,
        rounds: int | None = None,
        lam: float = 0.05,
        transfer: str = "mmd",
        temperature: float = 4.0,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_between("mu", mu, 0, 1)
        check_at_least("rounds", rounds, 1, optional=True)
        check_between("lam (lambda)", lam, 0, 1)
        check_choice("transfer", transfer, ("mmd", "kd"))
        check_number("temperature", temperature, strict=True)
        self.mu, self.rounds, self.lam = mu, rounds, lam
        self.transfer, self.temperature = transfer, temperature
        self.global_model = self.copy_network()  # encoder and head of the client itself are the private model
        self.frozen |= self.find_frozen(self.global_model)
        self.register_buffer("started", torch.zeros((), dtype=torch.int64))  # whether there is a private model

    def check_run(self, facts: RunFacts) -> None:
        """Refuse a run without end, in which the moving average has no schedule."""
        if facts.num_rounds is None and self.rounds is None:
            raise ConfigurationError(
                "FedPHP's moving average depends on the planned number of rounds, and the Trainer has none: set its "
                "max_epochs, or the method's rounds="
            )

    def receive(self, broadcast: Broadcast) -> None:
        """Take over the global model; a client that has never trained takes it for the private one, too."""
        super().receive(broadcast)
        if not int(self.started):
            self._inherit(0.0)

    def _inherit(self, mu: float) -> None:
        """The private model p becomes mu p + (1 - mu) w."""
        private = self.state_dict()
        for name, trained in self.global_model.state_dict().items():
            if name not in self.frozen:
                own = private[name]
                own.copy_(torch.lerp(own, trained, 1 - mu) if own.is_floating_point() else trained)

    def before_fit(self, context: FitContext) -> float:
        """The weight mu_t of the private model that there is: mu t / T; 0 in the first fit of a client."""
        mu = self.mu * min(context.round / (self.rounds or context.facts.num_rounds or 1), 1.0) * int(self.started)
        self.started.fill_(1)
        return mu

    def phases(self) -> tuple[Phase, ...]:
        """Encoder and head of the global model, at once."""
        return (Phase(train=("global_model.*",), epochs=self.epochs),)

    def active_network(self) -> nn.Module | None:
        """The global model where it trains; otherwise the private one."""
        return self.global_model if self.training and self.phase.trains_only("global_model") else None

    def frozen_norms(self) -> Iterator[nn.Module]:
        """As in the base, and all layers of the private model while it teaches, in evaluation mode."""
        yield from super().frozen_norms()
        if self.phase.trains_only("global_model"):
            yield from (*self.encoder.modules(), *self.head.modules())

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """(1 - lambda) F(w) + lambda times the distance to the private model."""
        if not self.uses("transfer"):
            return super().training_step(batch, batch_idx)
        inputs, labels = batch
        features = self.encode(inputs)
        terms = {name: (1 - self.lam) * term for name, term in self.loss_terms(features, labels).items()}
        with torch.no_grad():
            private = self.encoder(inputs)
            scores = at_least_single(self.head(private)) / self.temperature if self.transfer == "kd" else None
        if scores is None:
            distance = maximum_mean_discrepancy(features, private)
        else:
            learned = at_least_single(self.classify(features)).log_softmax(dim=1)
            distance = -(scores.softmax(dim=1) * learned).sum(dim=1).mean()
        return self.sum_of_terms(terms | {"transfer": self.lam * distance})

    def make_update(self, context: FitContext, before: float) -> ClientUpdate:
        """The trained model, which also enters the private one."""
        self._inherit(before)
        return super().make_update(context, before)
