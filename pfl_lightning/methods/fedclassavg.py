"""FedClassAvg: classifier averaging with representation learning for heterogeneous models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_choice, check_number
from pfl_lightning.client import Batch, Citation, FederatedClient, FitContext, Phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional import proximal_term, supervised_contrastive_loss
from pfl_lightning.messages import Broadcast
from pfl_lightning.options import EvaluationOptions, Unpack
from pfl_lightning.state.tensors import TensorDict

SquaredProximal = bool | Literal["published"]
PAPER: tuple[SquaredProximal, bool, float, float | None] = (False, True, 0.07, None)
PUBLISHED: tuple[SquaredProximal, bool, float, float | None] = ("published", False, 100.0, 0.07)
"""Of squared_proximal, normalize, temperature and base_temperature."""

BETAS = (0.5, 0.999)  # of Adam, in the published implementation; the paper names no optimizer


class FedClassAvg(FederatedClient):
    """Clients of different encoders share a head, averaged (3); the encoder learns contrastively from two views.

    Every batch has two augmented views of each sample. A client is evaluated as its local training leaves it, before
    the next averaging.

    Ablations (Table 4): ``proximal=0`` leaves out the proximal term, ``contrastive=False`` the contrastive one (a batch
    then has one view); both together leave classifier averaging. ``share_encoder=True`` is "+weight", for encoders of
    one architecture.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; encoders may differ, their feature width may not.
        num_classes: Number of classes, C.
        proximal: rho, the weight of the distance of the head to the global head (5).
        objective: ``"paper"``, or ``"published"`` for the loss of the published implementation: a contrast of
            features that are not normalized, ``temperature=100, base_temperature=0.07``, which weighs far more against
            the cross entropy, and ``squared_proximal="published"``. It sets these four.
        squared_proximal: ``False`` for the Euclidean norm (paper), ``"published"`` for half the sum over weight and
            bias of each one's mean of squares (published implementation), ``True`` for the mean of squares over both
            together.
        contrastive: Whether the supervised contrastive loss is part of (4).
        normalize: Whether it sees L2-normalized features.
        temperature: Its temperature.
        base_temperature: It is scaled by ``temperature / base_temperature``; ``None`` does not scale.
        head_relu: Whether the head is a ReLU and a linear layer (published implementation); the contrastive loss
            sees the features before the ReLU.
        share_encoder: Whether the encoder is averaged, too.
        warm_up_epochs: Epochs on its own data that a client trains, in addition, in the first round that it takes part
            in, from the head that it is sent. (The published implementation has one such epoch of all clients before
            the first round; the paper has none.)
        lr: Learning rate.
        epochs: Local epochs a round, E.
        optimizer: Makes the optimizer from the trainable parameters; ``None`` is Adam with betas (0.5, 0.999) and
            without weight decay, unless ``weight_decay`` is given.
        lr_scheduler: Makes a scheduler from the optimizer, stepped after every local epoch of a phase.
        weight_decay: Weight decay.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "FedClassAvg: Local Representation Learning for Personalized Federated Learning on Heterogeneous Neural "
        "Networks",
        "Jang et al.",
        "ICPP",
        2022,
    )
    feature_based = True
    shared: tuple[str, ...] = ("head.*",)
    batch_norm = "shared"  # of a shared encoder; the head has none
    eval_model = "trained"
    paper_batch_size = 64
    loss_names = ("cross_entropy", "contrastive", "proximal")

    rounds_trained: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        proximal: float = 0.1,
        objective: Literal["paper", "published"] = "paper",
        squared_proximal: SquaredProximal = False,
        contrastive: bool = True,
        normalize: bool = True,
        temperature: float = 0.07,
        base_temperature: float | None = None,
        head_relu: bool = True,
        share_encoder: bool = False,
        warm_up_epochs: int = 0,
        lr: float = 1e-4,
        epochs: int = 1,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        lr_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
        weight_decay: float = 0.0,
        **options: Unpack[EvaluationOptions],
    ) -> None:
        make = optimizer or partial(torch.optim.Adam, lr=lr, betas=BETAS, weight_decay=weight_decay)
        super().__init__(
            encoder,
            num_classes,
            lr=lr,
            epochs=epochs,
            optimizer=make,
            lr_scheduler=lr_scheduler,
            weight_decay=weight_decay,
            **options,
        )
        check_number("proximal (rho)", proximal)
        check_number("temperature", temperature, strict=True)
        check_number("base_temperature", base_temperature, strict=True, optional=True)
        check_at_least("warm_up_epochs", warm_up_epochs, 0)
        check_choice("objective", objective, ("paper", "published"))
        check_choice("squared_proximal", squared_proximal, (False, True, "published"))
        if objective == "published":
            if (squared_proximal, normalize, temperature, base_temperature) != PAPER:
                raise ConfigurationError(
                    "objective='published' sets squared_proximal, normalize, temperature and base_temperature: leave "
                    "them out, or give them without it"
                )
            squared_proximal, normalize, temperature, base_temperature = PUBLISHED
        self.proximal, self.squared_proximal = proximal, squared_proximal
        self.contrastive, self.normalize = contrastive, normalize
        self.temperature, self.base_temperature = temperature, base_temperature
        self.head_relu, self.warm_up_epochs = head_relu, warm_up_epochs
        self.shared = ("encoder.*", "head.*") if share_encoder else ("head.*",)
        self.views = 2 if contrastive else 1
        self.received_head = TensorDict(persistent=False)
        self.register_buffer("rounds_trained", torch.zeros((), dtype=torch.int64))

    def receive(self, broadcast: Broadcast) -> None:
        """Replace the head by the global one, and remember it for the proximal term."""
        super().receive(broadcast)
        head = {name: broadcast.weights[name] for name in self.match(broadcast.weights, ("head.*",))}
        self.received_head.assign({name: value.clone() for name, value in head.items()})

    def before_fit(self, context: FitContext) -> None:
        """Count the client's rounds: the warm-up comes in the first."""
        self.rounds_trained += 1

    def phases(self) -> tuple[Phase, ...]:
        """E epochs, after the warm-up in the client's first round."""
        warm_up = self.warm_up_epochs if int(self.rounds_trained) == 1 else 0
        fit = Phase(epochs=self.epochs)
        return (Phase("warm_up", epochs=warm_up), fit) if warm_up else (fit,)

    def classify(self, features: Tensor) -> Tensor:
        """Class scores, (N, C)."""
        return super().classify(F.relu(features) if self.head_relu else features)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The loss (4) of two views x', x'' of a batch, inputs of shape (B, 2, ...); of one view without contrast."""
        inputs, labels = batch
        two_views = self.contrastive and not self.phase.plain  # a plain phase, as of a personalization, has one
        contrastive = two_views and self.uses("contrastive")
        if contrastive:
            first, second = self.encoder(inputs.transpose(0, 1).flatten(0, 1)).chunk(2)  # one pass for both views
        else:
            first = self.encoder(inputs[:, 0] if two_views else inputs)
        terms = self.loss_terms(first, labels)  # CE(g(f(x')), y)
        return self.sum_of_terms(terms | self.view_terms((first, second) if contrastive else (first,), labels))

    def view_terms(self, views: tuple[Tensor, ...], labels: Tensor) -> dict[str, Tensor]:
        """SupCon(f(x'), f(x'')) of two views of a batch, and the proximal term."""
        terms = {}
        if len(views) == 2 and self.uses("contrastive"):
            terms["contrastive"] = supervised_contrastive_loss(
                torch.stack(views, dim=1), labels, self.temperature, self.base_temperature, self.normalize
            )
        if self.proximal > 0 and self.uses("proximal"):
            terms["proximal"] = self.proximal * self._distance()
        return terms

    def _distance(self) -> Tensor:
        """||w_head - w_global_head||_2 (5), or means of the squares."""
        received = self.received_head.as_state()
        own = {f"{self.head_prefix}{name}": parameter for name, parameter in self.head.named_parameters()}
        head = {name: parameter for name, parameter in own.items() if name in received}  # not what is frozen, or stays
        received = {name: received[name] for name in head}
        if self.squared_proximal == "published":
            means = [proximal_term([p], [received[name]]) / p.numel() for name, p in head.items()]
            return torch.stack(means).sum() / 2
        distance = proximal_term(head, received, squared=self.squared_proximal)
        return distance / sum(p.numel() for p in head.values()) if self.squared_proximal else distance
