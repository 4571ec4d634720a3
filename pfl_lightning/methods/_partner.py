"""Base of the clients that train a second network, the partner, beside their own and on the same batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.client import Batch, FederatedClient, FitContext, Phase
from pfl_lightning.encoders import EncoderFactory, encoder_class, encoder_label
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.state.closures import copy_module

PARTNER = ("partner.*",)
"""Patterns of the partner's parameters and buffers."""


class PartnerClient(FederatedClient):
    """Client with a network of its own, and a partner that travels; one optimizer trains both on the same batches.

    The partner is the same for all clients, whatever their own architecture. A subclass gives the loss terms of both in
    :meth:`pair_terms`. Where each term has gradients in one network alone (the other's outputs are detached), one
    optimizer is the same as two with equal settings.

    Evaluated, fine-tuned and exported is the own network. Of a client that has never trained it is the partner that the
    server would send, as the own network is still as it was drawn.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; encoders may differ between clients.
        num_classes: Number of classes, C.
        partner: Encoder of the partner: a registered name, what makes one from the shape of a sample, or a module that
            is copied. It is built once by the run's seed, with a linear head. ``None`` copies the client's own network,
            which must then be the same for all clients.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    shared = PARTNER
    batch_norm = "shared"
    pair_losses: ClassVar[tuple[str, ...]]
    """Names of the loss terms that need both networks."""
    personalization_losses = ("cross_entropy",)
    not_exported: ClassVar[tuple[str, ...]] = PARTNER

    partner: Any
    serving: Tensor | None
    """Set for the time of an evaluation in which the partner takes the place of the own network."""

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        partner: str | EncoderFactory | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        object.__setattr__(self, "partner_encoder", _one_encoder(partner))  # a module is no part of the client
        self.partner_label = None if partner is None else encoder_label(partner)
        self.register_buffer("serving", None, persistent=False)
        if partner is None:
            self.take_partner(self.copy_network())

    def attach_partner(self, encoder: nn.Module) -> None:
        """Make the partner of its encoder: a linear head on its features."""
        self.partner_encoder = None  # which is made: what makes it need not be pickled with the client
        head = nn.Linear(encoder.out_features, self.num_classes)  # type: ignore[arg-type]
        self.take_partner(nn.ModuleDict({"encoder": encoder, "head": head}))

    def take_partner(self, partner: Any) -> None:
        """Hold a network with an encoder and a head as the partner."""
        self.partner = partner
        self.frozen |= self.find_frozen(partner)

    def before_evaluation(self, context: FitContext) -> None:
        """A client that has never trained is evaluated with the partner, which others have trained."""
        if not context.stored:
            self.serving = torch.ones((), device=context.data.device)

    def forward(self, inputs: Tensor) -> Tensor:
        """Class scores (N, C) of the own network, or of the partner that serves in its place."""
        if self.serving is None:
            return super().forward(inputs)
        scores: Tensor = self.partner.head(self.partner.encoder(inputs))
        return scores

    def stand_in_with_new_head(self, method: Any) -> Any:
        """A client of another method with a new head, on a copy of the partner's encoder."""
        encoder = copy_module(self.partner.encoder)
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(f"partner.encoder.{name}" not in self.frozen)
        return method(encoder, self.num_classes)

    def encoder_state(self) -> dict[str, Tensor]:
        """The own encoder, or the partner's that serves in its place."""
        encoder = self.encoder if self.serving is None else self.partner.encoder
        return {f"encoder.{name}": value for name, value in encoder.state_dict().items()}

    def exported_module(self) -> L.LightningModule:
        """The client with the network that it was evaluated with as its own."""
        if self.serving is not None:
            self._take_over_partner()
            self.exported_label = self.partner_label
        return super().exported_module()

    def inspected_module(self) -> FederatedClient:
        """The client, or a copy whose own network is the partner that serves in its place."""
        if self.serving is None:
            return self
        shown = copy_module(self)
        shown._take_over_partner()
        return shown

    def _take_over_partner(self) -> None:
        self.encoder, self.head, self.serving = self.partner.encoder, self.partner.head, None

    def personalization_phases(self) -> tuple[Phase, ...]:
        """Phases that the options ask for, of the own network, or of the partner that serves in its place."""
        prefix = "" if self.serving is None else "partner."
        phases = super().personalization_phases()
        trained = (("encoder.*", "head.*") if phase.train == ("*",) else phase.train for phase in phases)
        return tuple(
            replace(phase, train=tuple(f"{prefix}{pattern}" for pattern in patterns))
            for phase, patterns in zip(phases, trained, strict=True)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The loss of a batch in both networks; in a fine-tuning, or of an exported model, of one alone."""
        inputs, labels = batch[:2]
        if self.serving is not None:
            return self.sum_of_terms({"cross_entropy": F.cross_entropy(self(inputs), labels)})
        if not all(self.uses(name) for name in self.pair_losses):  # in a fine-tuning
            return super().training_step(batch, batch_idx)
        return self.sum_of_terms(self.pair_terms(self.encode(inputs), self.partner.encoder(inputs), labels))

    def pair_terms(self, features: Tensor, partner_features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Terms of the loss by name, from features (N, d) of the own network and those of the partner (N, d')."""
        raise NotImplementedError


def _one_encoder(partner: Any) -> str | EncoderFactory | None:
    """What makes the partner's encoder, checked as far as it can be without data."""
    if isinstance(partner, str):
        encoder_class(partner)
    elif partner is not None and not callable(partner):
        raise ConfigurationError(
            "partner must be one encoder for all clients, a registered name or a callable from the shape of a sample "
            f"to an encoder, got {partner!r}; a list of encoders belongs to the federation's own encoder"
        )
    return cast("str | EncoderFactory | None", partner)
