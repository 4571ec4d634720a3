"""FedALA: adaptive local aggregation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_between, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.functional.inner_loop import evaluating
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.messages import ClientUpdate
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.state.tensors import TensorDict

State = dict[str, Tensor]


class FedALA(FederatedClient):
    """FedAvg in which a client learns, element by element, how much of the received last layers it takes over.

    A fit begins with the received lower layers and, in the upper ones, own + (received - own) * w. The weights w in
    [0, 1] are learned by gradient descent on a sample of the client's data before the fit, and kept.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        eta: Learning rate of the weights; 0 leaves them at one, which is FedAvg.
        sample_share: Share of the client's training samples that the weights are learned on, in (0, 1].
        layers: Number of parameter tensors, from the last, that are mixed: 2 is a linear head. ``None`` mixes all.
        threshold: The first time a client learns its weights, it goes on until the standard deviation of the losses of
            the last ``window`` passes is below this; later it makes one pass.
        window: See ``threshold``.
        max_passes: Most passes of that first time.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`. With ``eval_model="aggregated"``
            a client is evaluated as its next fit would begin, which takes the learning of the weights in every
            evaluation, with ``"trained"`` as its last one ended.
    """

    citation = Citation(
        "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", "Zhang et al.", "AAAI", 2023
    )
    batch_norm = "shared"
    not_exported = ("own.*", "mixing.*", "learned")

    learned: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        eta: float = 1.0,
        sample_share: float = 0.8,
        layers: int | None = 2,
        threshold: float = 0.1,
        window: int = 10,
        max_passes: int = 100,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("eta", eta)
        check_number("sample_share", sample_share, strict=True)
        check_between("sample_share", sample_share, 0, 1)
        check_at_least("layers", layers, 1, optional=True)
        check_number("threshold", threshold)
        check_at_least("window", window, 1)
        check_at_least("max_passes", max_passes, 1)
        self.eta, self.sample_share, self.layers = eta, sample_share, layers
        self.threshold, self.window, self.max_passes = threshold, window, max_passes
        upper = self._upper()
        self.own = TensorDict({name: p.detach().clone() for name, p in upper.items()})  # after the client's last fit
        self.mixing = TensorDict({name: torch.ones_like(p) for name, p in upper.items()})  # w
        self.register_buffer("learned", torch.full((), -1, dtype=torch.int64))  # times; -1 without a fit of its own

    def _upper(self) -> dict[str, nn.Parameter]:
        """The parameters that are mixed."""
        trained = [(name, p) for name, p in self.named_parameters() if name not in self.frozen]
        return dict(trained if self.layers is None else trained[-self.layers :])

    def before_fit(self, context: FitContext) -> None:
        """Learn the weights and mix; a client without a fit of its own goes on from the received model."""
        if int(self.learned) >= 0:
            mixing = self._learn(context)
            for name, weights in self.mixing.as_state().items():
                weights.copy_(mixing[name])
        self.learned.add_(1)

    def before_evaluation(self, context: FitContext) -> None:
        """The model that the next fit would begin with; what was learned for it is forgotten."""
        if self.eval_model == "aggregated" and int(self.learned) >= 0:
            self._learn(context)

    def _learn(self, context: FitContext) -> State:
        """Learn the weights, write the mixture into the model, and return the weights."""
        received = {name: p.detach().clone() for name, p in self._upper().items()}
        own = {name: value.to(received[name]) for name, value in self.own.as_state().items()}
        mixing = {name: value.clone() for name, value in self.mixing.as_state().items()}
        losses: list[float] = []
        with evaluating(self):
            while self.eta > 0 and len(losses) < (self.max_passes if int(self.learned) == 0 else 1):
                losses.append(self._pass(context, own, received, mixing))
                if len(losses) > self.window and np.std(losses[-self.window :]) < self.threshold:
                    break
        with torch.no_grad():
            for name, parameter in self._upper().items():
                parameter.copy_(torch.lerp(own[name], received[name], mixing[name]))
        return mixing

    def _pass(self, context: FitContext, own: State, received: State, mixing: State) -> float:
        """One pass over a sample of the data, which changes the weights; the loss of its last batch."""
        heads_alone = all(name.startswith("head.") for name in own)  # whose inputs do not change meanwhile
        inputs, labels = context.data.features(self.encoder) if heads_alone else context.data.tensors()
        count = max(1, int(self.sample_share * len(labels)))
        sample = torch.randperm(len(labels))[:count].to(labels.device)
        for rows in sample.split(context.data.batch_size):
            at = {n: torch.lerp(own[n], received[n], w).requires_grad_() for n, w in mixing.items()}
            with torch.enable_grad(), context.data.forward_context():
                if heads_alone:
                    params = {name.removeprefix("head."): value for name, value in at.items()}
                    scores = functional_call(self.head, params, (inputs[rows],))
                else:
                    scores = functional_call(self, at, (context.data.convert_input(inputs[rows]),))
                loss = F.cross_entropy(at_least_single(scores), labels[rows], reduction="sum")  # see full_gradient
            gradients = torch.autograd.grad(loss, list(at.values()), materialize_grads=True)
            for name, gradient in zip(at, gradients, strict=True):
                step = self.eta * (gradient / len(rows)) * (received[name] - own[name])
                mixing[name] = (mixing[name] - step).clamp(0, 1)
        return float(loss.detach()) / len(rows)

    def make_update(self, context: FitContext, before: None) -> ClientUpdate:
        """The trained model; the client keeps its upper layers."""
        upper = self._upper()
        with torch.no_grad():
            for name, value in self.own.as_state().items():
                value.copy_(upper[name])
        return super().make_update(context, before)
