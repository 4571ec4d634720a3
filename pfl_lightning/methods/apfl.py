"""APFL: adaptive personalized federated learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_between, check_choice, check_learning_rate, check_number
from pfl_lightning.client import Batch, Citation, FederatedClient, FitContext, Phase
from pfl_lightning.functional import loss_and_gradients, scores_at
from pfl_lightning.messages import Broadcast
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.state.tensors import load_state

Mixing = Literal["parameters", "outputs"]


class APFL(FederatedClient):
    """A global model w as in FedAvg, and on every client a model v of its own; their mixture is evaluated.

    The mixture is v_bar = alpha v + (1 - alpha) w. A batch trains w on F(w), and v on F(v_bar), both from the same v
    and w. A client's v starts as a copy of the global model that it receives for its first fit; until then the client
    is evaluated with the global model.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        alpha: Mixing parameter, in [0, 1], or its first value: 0 is FedAvg, 1 is local training.
        adaptive: Whether every client's own alpha takes a gradient step at the first batch of a fit.
        alpha_lr: Learning rate of alpha; ``None`` takes ``lr``.
        alpha_decay: Decay of alpha towards 0 in that step (0.02 in the published implementation).
        mixing: Whether the parameters of v and w are mixed, as the paper is read, or their class ``"outputs"``, as in
            the published implementation.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`. What ``fine_tune`` adapts is the
            mixture; with ``mixing="outputs"`` it is v inside of it, whose gradients have the factor alpha.
    """

    citation = Citation("Adaptive Personalized Federated Learning", "Deng et al.", "arXiv", 2020)
    shared = ("global_model.*",)
    batch_norm = "shared"
    loss_names = ("cross_entropy", "mixture")
    personalization_losses = ("mixture",)

    alpha: Tensor
    started: Tensor
    new_fit: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        alpha: float = 0.5,
        adaptive: bool = False,
        alpha_lr: float | None = None,
        alpha_decay: float = 0.0,
        mixing: Mixing = "parameters",
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_between("alpha", alpha, 0, 1)
        check_learning_rate("alpha_lr", alpha_lr, optional=True)
        check_number("alpha_decay", alpha_decay)
        check_choice("mixing", mixing, get_args(Mixing))
        self.adaptive, self.alpha_lr, self.alpha_decay, self.mixing = adaptive, alpha_lr, alpha_decay, mixing
        self.global_model = self.copy_network()  # w; the encoder and the head of the client itself are v
        self.frozen |= self.find_frozen(self.global_model)
        self.register_buffer("alpha", torch.tensor(float(alpha)))
        self.register_buffer("started", torch.zeros((), dtype=torch.int64))  # whether the client has a v of its own
        self.register_buffer("new_fit", torch.zeros((), dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def receive(self, broadcast: Broadcast) -> None:
        """Take over w; a client that has never trained takes it for v, too."""
        super().receive(broadcast)
        if not int(self.started):
            received = self.global_model.state_dict()
            for part in ("encoder", "head"):
                for name, own in getattr(self, part).state_dict().items():
                    if f"{part}.{name}" not in self.frozen:
                        own.copy_(received[f"{part}.{name}"])

    def before_fit(self, context: FitContext) -> None:
        """From now on v is the client's own, and the next batch is the first of a fit."""
        self.started.fill_(1)
        self.new_fit.fill_(1)

    @torch.no_grad()
    def before_evaluation(self, context: FitContext) -> None:
        """What a fine-tuning adapts is the mixture itself: it becomes v, with alpha 1, for this evaluation alone."""
        if self.mixing == "parameters" and self.personalization_phases():
            load_state(self, self._mixed_parameters(self.alpha))
            self.alpha.fill_(1)

    def personalization_phases(self) -> tuple[Phase, ...]:
        """Phases that the options ask for, of v: w stays as it is."""
        phases = super().personalization_phases()
        return tuple(replace(p, train=("encoder.*", "head.*")) if p.train == ("*",) else p for p in phases)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """F(w) + F(v_bar): the first has no gradient in v, the second none in w."""
        inputs, labels = batch
        scores = self._global_scores(inputs)
        terms = {}
        if self.uses("cross_entropy"):
            terms["cross_entropy"] = F.cross_entropy(scores, labels)  # w - eta grad F(w)
        if self.uses("mixture"):
            alpha = self.alpha.clone()  # it may change below, before the backward pass
            mixed = self._mixed_scores(alpha, inputs, scores.detach())
            terms["mixture"] = F.cross_entropy(mixed, labels)  # v - eta alpha grad F(v_bar)
        if self.adaptive and self.uses("cross_entropy") and batch_idx == 0:
            self._adapt(inputs, labels, scores.detach())
        return self.sum_of_terms(terms)

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores of the mixture, (N, C)."""
        if self.mixing == "parameters":  # without w's scores
            return scores_at(self, self._mixed_parameters(self.alpha), inputs, own_buffers=True)
        return self._mixed_scores(self.alpha, inputs, self._global_scores(inputs).detach())

    def _global_scores(self, inputs: Tensor) -> Tensor:
        if self.mixing == "parameters" and not self.uses("cross_entropy"):  # nobody asks for them
            return inputs.new_zeros(())
        scores: Tensor = self.global_model.head(self.global_model.encoder(inputs))  # type: ignore[operator]
        return scores

    def _mixed_scores(
        self, alpha: Tensor, inputs: Tensor, global_scores: Tensor, *, own_buffers: bool = True
    ) -> Tensor:
        """Class scores of alpha v + (1 - alpha) w, without a gradient in w.

        Where parameters are mixed, batch normalization runs on the statistics that belong to v.
        """
        if self.mixing == "outputs":
            own = scores_at(self, {}, inputs, own_buffers=own_buffers)
            return alpha * own + (1 - alpha) * global_scores
        return scores_at(self, self._mixed_parameters(alpha), inputs, own_buffers=own_buffers)

    def _mixed_parameters(self, alpha: Tensor) -> dict[str, Tensor]:
        """v_bar = alpha v + (1 - alpha) w."""
        w = dict(self.global_model.named_parameters())
        return {name: alpha * v + (1 - alpha) * w[name].detach() for name, v in self.network_parameters().items()}

    def _adapt(self, inputs: Tensor, labels: Tensor, global_scores: Tensor) -> None:
        """Alpha - eta <v - w, grad F(v_bar)>, at the first batch of a fit, before v and w have changed."""

        def objective(at: Mapping[str, Tensor]) -> Tensor:
            mixed = self._mixed_scores(at["alpha"], inputs, global_scores, own_buffers=False)
            return F.cross_entropy(mixed, labels)

        _, slope = loss_and_gradients(objective, {"alpha": self.alpha})
        lr = self.lr if self.alpha_lr is None else self.alpha_lr
        stepped = (self.alpha - lr * (slope["alpha"] + self.alpha_decay * self.alpha)).clamp(0, 1)
        with torch.no_grad():
            self.alpha.copy_(torch.where(self.new_fit > 0, stepped, self.alpha))
            self.new_fit.zero_()

    def encoder_state(self) -> dict[str, Tensor]:
        """The encoder that is evaluated, for a new head on it: the mixture's; where outputs are mixed, v's."""
        state = super().encoder_state()
        if self.mixing == "outputs":
            return state
        mixed = {name: tensor.detach() for name, tensor in self._mixed_parameters(self.alpha).items()}
        return {name: mixed.get(name, own) for name, own in state.items()}
