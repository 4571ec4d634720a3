"""Per-FedAvg: a global model from which one gradient step leads to each client's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_choice, check_learning_rate, check_number
from pfl_lightning.client import Batch, Citation, FederatedClient, FitContext, Phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.functional import hessian_product, loss_and_gradients, scores_at
from pfl_lightning.options import OptionsWithoutSGD, Unpack

Order = Literal["FO", "HF", "exact"]


class PerFedAvg(FederatedClient):
    """MAML over clients: w is trained such that w - alpha grad f_k(w) is a good model of client k.

    A batch of the loader is cut into D, D' and, for ``order="HF"``, D'', of equal sizes but for one sample. Before an
    evaluation, every client adapts w to its own training data at the rate alpha; the result is evaluated and forgotten.
    What is smaller than one sample in each part is left out: an incomplete last batch; with batch normalization a
    part must have two samples.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        alpha: Learning rate of the inner step, and of the adaptation before an evaluation.
        order: ``"FO"`` leaves out second derivatives, ``"HF"`` approximates their product with a gradient by a
            difference of two gradients, ``"exact"`` computes it, on D. ``"HF"`` takes single or double precision, and
            a model without dropout: the difference is small, and noise would cover it.
        delta: Step of that difference.
        adapt_epochs: Epochs of the adaptation; ``None`` for a single step on all training data together.
        lr: beta, learning rate of the outer step.
        momentum: Momentum of the outer steps.
        weight_decay: Weight decay of the outer steps.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`; ``fine_tune`` replaces the
            adaptation.
    """

    citation = Citation(
        "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach",
        "Fallah et al.",
        "NeurIPS",
        2020,
    )
    batch_norm = "shared"
    by_samples = False
    loss_names = ("adapted", "curvature")
    personalization_losses = ("cross_entropy",)

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        alpha: float = 0.01,
        order: Order = "FO",
        delta: float = 1e-3,
        adapt_epochs: int | None = 1,
        lr: float = 0.001,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **options: Unpack[OptionsWithoutSGD],
    ) -> None:
        super().__init__(encoder, num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay, **options)
        check_learning_rate("alpha", alpha)
        check_choice("order", order, get_args(Order))
        check_number("delta", delta, strict=True)
        check_at_least("adapt_epochs", adapt_epochs, 1, optional=True)
        self.alpha, self.order, self.delta, self.adapt_epochs = alpha, order, delta, adapt_epochs
        self._inner_sgd = partial(torch.optim.SGD, lr=alpha)  # one object, so that clients adapt together
        normed = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in self.modules())
        if order == "HF" and any(_draws(layer) for layer in self.modules()):
            raise ConfigurationError(
                'PerFedAvg(order="HF") takes the difference of two nearby gradients, but dropout in the encoder '
                'draws a different mask for each: use order="exact" or "FO", or set the dropout to 0'
            )
        self._parts = 3 if order == "HF" else 2
        self.smallest_batch = self._parts * (2 if normed else 1)

    def check_samples(self, samples: Mapping[int, int]) -> None:
        """Refuse clients whose samples cannot be divided into D, D' and D''."""
        least = min(samples, key=lambda client: samples[client])
        if samples[least] < self.smallest_batch:
            raise ConfigurationError(
                f"PerFedAvg(order={self.order!r}) divides each batch into {self._parts} parts, which takes at least "
                f"{self.smallest_batch} samples; client {least} has {samples[least]}. Give every client that many, or "
                "use a method that does not divide batches, such as FedAvg with fine_tune"
            )

    def check_run(self, facts: RunFacts) -> None:
        """Refuse half precision for the difference of two gradients, which would be rounding errors."""
        if self.order == "HF" and not facts.precision.startswith(("32", "64")):
            raise ConfigurationError(
                f'PerFedAvg(order="HF") takes the difference of two nearby gradients, but precision='
                f'{facts.precision!r} rounds it away: use order="exact" or "FO", or precision="32-true"'
            )

    def before_fit(self, context: FitContext) -> None:
        """Refuse batches that cannot be divided."""
        if context.data.batch_size < self.smallest_batch:
            raise ConfigurationError(
                f"{context.who}, round {context.round + 1}: PerFedAvg(order={self.order!r}) divides each "
                f"batch into {self._parts} parts, which takes at least {self.smallest_batch} samples, and batch_size "
                f"is {context.data.batch_size}; make it larger"
            )

    def phases(self) -> tuple[Phase, ...]:
        """Algorithm 1: steps on the loss after an inner step."""
        losses = ("adapted",) if self.order == "FO" else ("adapted", "curvature")
        return (Phase("meta", epochs=self.epochs, losses=losses, smallest_batch=self.smallest_batch),)

    def personalization_phases(self) -> tuple[Phase, ...]:
        """The inner step of Algorithm 1 on the client's own training data, alpha at a time."""
        if self.personalization is not None or self.fine_tune is not None or self.alpha == 0:
            return super().personalization_phases()
        epochs, size = (1, 2**31 - 1) if self.adapt_epochs is None else (self.adapt_epochs, None)
        return (Phase("adapt", ("*",), epochs, None, size, True, self._inner_sgd, self.personalization_losses),)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The loss whose gradient is the outer step's: (I - alpha H(w; D'')) grad f(w~; D').

        With H(w; D'') grad f(w~; D') = h it is f(w~; D') - alpha <h, w>, where w~ = w - alpha grad f(w; D) has the
        inner gradient detached: the first term's gradient is that of ``"FO"``, the second's is -alpha h.
        """
        if not self.uses("adapted"):
            return super().training_step(batch, batch_idx)
        inputs, labels = (tensor.tensor_split(self._parts) for tensor in batch)
        own = self.network_parameters()
        objectives = [partial(self._loss_at, *part) for part in zip(inputs, labels, strict=True)]  # on D, D', D''
        _, inner = loss_and_gradients(objectives[0], own)
        adapted = {name: p - self.alpha * inner[name] for name, p in own.items()}  # w~
        terms = {"adapted": self._loss_at(inputs[1], labels[1], adapted, own_buffers=True)}
        if self.uses("curvature"):
            _, outer = loss_and_gradients(objectives[1], adapted)  # v = grad f(w~; D')
            if self.order == "exact":
                bent = hessian_product(objectives[0], own, outer)
            else:
                bent = difference_product(objectives[2], own, outer, self.delta)
            products = [(along * (own[name] - own[name].detach())).sum() for name, along in bent.items()]
            terms["curvature"] = -self.alpha * torch.stack(products).sum()  # 0, with a gradient
        return self.sum_of_terms(terms)

    def _loss_at(
        self, inputs: Tensor, labels: Tensor, params: Mapping[str, Tensor], *, own_buffers: bool = False
    ) -> Tensor:
        """f(params; D)."""
        return F.cross_entropy(scores_at(self, params, inputs, own_buffers=own_buffers), labels)


def difference_product(
    objective: Callable[[Mapping[str, Tensor]], Tensor],
    params: Mapping[str, Tensor],
    vector: Mapping[str, Tensor],
    delta: float,
) -> dict[str, Tensor]:
    """Product of an objective's Hessian with a vector v, by [grad f(w + delta v) - grad f(w - delta v)] / (2 delta)."""
    ahead, behind = (
        loss_and_gradients(objective, {name: p + step * vector[name] for name, p in params.items()})[1]
        for step in (delta, -delta)
    )
    return {name: (ahead[name] - behind[name]) / (2 * delta) for name in ahead}


def _draws(layer: nn.Module) -> bool:
    """Whether a layer drops values at random in training."""
    dropout = isinstance(layer, nn.modules.dropout._DropoutNd) or type(layer).__name__ in (
        "StochasticDepth",
        "DropPath",
    )
    share = getattr(layer, "p", getattr(layer, "drop_prob", 0.0)) if dropout else getattr(layer, "dropout", 0.0)
    return isinstance(share, float | int) and share > 0  # the latter of recurrent and attention layers
