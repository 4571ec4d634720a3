"""pFedMe: personalized models by Moreau envelopes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_learning_rate, check_number
from pfl_lightning.client import Batch, Citation, FederatedClient, FitContext
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional import descend, proximal_term, scores_at
from pfl_lightning.messages import ClientUpdate
from pfl_lightning.options import OptionsWithoutSGD, Unpack
from pfl_lightning.server import AveragingAggregator
from pfl_lightning.state.tensors import TensorDict, load_state, norm_names


class PFedMe(FederatedClient):
    """A global model w, and a personal model theta that is the best one near it, found for every batch.

    For a batch, theta takes K gradient steps on f(theta) + lambda / 2 ||theta - w||^2; then w moves towards theta. What
    a client is evaluated with is the theta of its last fit; before its first one, w.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        lam: lambda, how strongly theta is held to w.
        inner_steps: K, steps of theta for a batch.
        inner_lr: Learning rate of theta; ``inner_lr * lam`` must be below 2.
        inner_weight_decay: Weight decay of theta (0.001 in the published implementation).
        restart: Whether theta begins at w for every batch. Otherwise it begins at w in every fit, and goes on from
            batch to batch, as in the published implementation.
        beta: How far the server goes from w to the mean of the clients' models.
        lr: eta, learning rate of w; w moves by ``lr * lam`` of the way to theta; it must be below 2.
        momentum: Momentum of w.
        weight_decay: Weight decay of w.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`; with ``eval_model="aggregated"``
            the global model is evaluated.
    """

    citation = Citation("Personalized Federated Learning with Moreau Envelopes", "Dinh et al.", "NeurIPS", 2020)
    batch_norm = "shared"
    eval_model = "trained"
    loss_names = ("cross_entropy", "proximal")
    personalization_losses = ("cross_entropy",)

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        lam: float = 15.0,
        inner_steps: int = 5,
        inner_lr: float = 0.09,
        inner_weight_decay: float = 0.0,
        restart: bool = False,
        beta: float = 1.0,
        lr: float = 0.005,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        **options: Unpack[OptionsWithoutSGD],
    ) -> None:
        super().__init__(encoder, num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay, **options)
        check_number("lam (lambda)", lam)
        check_at_least("inner_steps", inner_steps, 1)
        check_learning_rate("inner_lr", inner_lr)
        check_number("inner_weight_decay", inner_weight_decay)
        check_number("beta", beta)
        if inner_lr * lam >= 2:
            raise ConfigurationError(
                f"inner_lr * lam is {inner_lr * lam:g}, expected below 2: from there on every step of theta overshoots "
                f"w and gets no closer; use an inner_lr below {2 / lam:g}, such as 1 / lam = {1 / lam:g}"
            )
        if lr * lam >= 2 and options.get("optimizer") is None:
            raise ConfigurationError(
                f"lr * lam is {lr * lam:g}, expected below 2: from there on every step of w overshoots theta and gets "
                f"no closer; use an lr below {2 / lam:g}, or at most 1 / lam = {1 / lam:g} to stop short of theta"
            )
        if options.get("batch_norm") == "own" and norm_names(self, affine=True) - norm_names(self, affine=False):
            raise ConfigurationError(
                'batch_norm="own": the client keeps the normalization weights of theta, and has no place for those of '
                'w, which are not shared: use "own_statistics"'
            )
        self.lam, self.inner_steps, self.inner_lr = lam, inner_steps, inner_lr
        self.inner_weight_decay, self.restart, self.beta = inner_weight_decay, restart, beta
        self.theta = TensorDict(persistent=False)  # for the time of a fit

    def configure_aggregator(self, num_clients: int) -> AveragingAggregator:
        """(1 - beta) w + beta mean of w_k, weighted by samples (the last step of Algorithm 1)."""
        return AveragingAggregator(self, num_clients, step=self.beta)

    def remedies(self) -> tuple[str, ...]:
        """Both steps are stable for small products of rate and lambda alone."""
        return (f"inner_lr and lr below 1 / lam = {1 / self.lam:g}",) if self.lam > 0 else ()

    def before_fit(self, context: FitContext) -> None:
        """Begin theta at the received w."""
        self.theta.assign({name: p.detach().clone() for name, p in self.network_parameters().items()})

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The Moreau envelope, f(theta) + lambda / 2 ||w - theta||^2, whose gradient in w is lambda (w - theta).

        The step of w is then w - eta lambda (w - theta), as in Algorithm 1, since theta is detached.
        """
        if not self.uses("proximal"):
            return super().training_step(batch, batch_idx)
        (inputs, labels), w, kept = batch, self.network_parameters(), self.theta.as_state()
        start = w if self.restart else {name: kept[name].clone() for name in w}  # theta changes below
        objective = partial(self._envelope, inputs, labels, {name: p.detach() for name, p in w.items()})
        steps, decay = self.inner_steps, self.inner_weight_decay
        theta = descend(objective, start, steps=steps, lr=self.inner_lr, weight_decay=decay)
        with torch.no_grad():
            loss = self._loss_at(inputs, labels, theta, own_buffers=True)  # the pass in which running statistics move
            for name, own in kept.items():
                own.copy_(theta[name])
        return self.sum_of_terms({"cross_entropy": loss, "proximal": self.lam / 2 * proximal_term(w, theta)})

    def _envelope(self, inputs: Tensor, labels: Tensor, w: Mapping[str, Tensor], theta: Mapping[str, Tensor]) -> Tensor:
        """f(theta) + lambda / 2 ||theta - w||^2 on a batch, which theta approximately minimizes."""
        return self._loss_at(inputs, labels, theta) + self.lam / 2 * proximal_term(theta, w)

    def _loss_at(
        self, inputs: Tensor, labels: Tensor, params: Mapping[str, Tensor], own_buffers: bool = False
    ) -> Tensor:
        """f(params) on a batch."""
        return F.cross_entropy(scores_at(self, params, inputs, own_buffers=own_buffers), labels)

    def make_update(self, context: FitContext, before: None) -> ClientUpdate:
        """The upload is w; what the client keeps, and is evaluated with, is theta."""
        update = super().make_update(context, before)
        if self.eval_model == "trained":
            load_state(self, self.theta.as_state())  # the upload is a copy
        return update
