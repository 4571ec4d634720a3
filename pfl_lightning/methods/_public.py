"""Base of the clients that learn from what others say of public samples, and what they send."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_at_least
from pfl_lightning.client import Batch, FederatedClient, FitContext, Phase
from pfl_lightning.fit.data import FitData
from pfl_lightning.functional.inner_loop import evaluating
from pfl_lightning.messages import Broadcast, ClientUpdate, statistics_field
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.state.tensors import TensorDict


@dataclass(frozen=True, kw_only=True)
class PublicBroadcast(Broadcast):
    """What the client's scores of the round's public samples are drawn to.

    Attributes:
        targets: Scores or probabilities of S_r in the order in which they were drawn, (S, C); ``None`` in round 0, and
            after a round in which nobody sent any.
    """

    targets: Tensor | None = statistics_field(shape="S C", floating=True, default=None)


@dataclass(frozen=True, kw_only=True)
class PublicUpdate(ClientUpdate):
    """What the trained client says of the next round's public samples.

    Attributes:
        scores: Scores or probabilities of S_{r+1}, (S, C); ``None`` where weights are sent.
    """

    scores: Tensor | None = statistics_field(shape="S C", floating=True, when="takes_scores", tells="public scores")


class PublicOptions(ClientOptions, total=False):
    """Options of a client that learns from public samples."""

    digest_epochs: int
    public_batch_size: int


class DistillingClient(FederatedClient):
    """Client that digests targets for public samples, then trains on its own; it sends scores instead of weights.

    What it says of the samples of the *next* round is sent at the end of this one. The published order exchanges twice
    a round, scores of S_r up and targets down, and is the same where all clients take part.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; encoders may differ.
        num_classes: Number of classes, C.
        public_samples: Public samples of a round, |S|.
        digest_epochs: Epochs on them before the own samples; 0 for local training.
        public_batch_size: Public samples in a batch.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`; ``epochs`` are for own samples.
    """

    shared: tuple[str, ...] = ()
    needs_public = True
    batch_norm = "own"
    loss_names: ClassVar[tuple[str, ...]] = ("cross_entropy", "distillation")
    personalization_losses = ("cross_entropy",)

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        public_samples: int,
        digest_epochs: int = 1,
        public_batch_size: int = 256,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_at_least("public_samples", public_samples, 1)
        check_at_least("digest_epochs", digest_epochs, 0)
        check_at_least("public_batch_size", public_batch_size, 1)
        self.public_samples, self.digest_epochs = public_samples, digest_epochs
        self.public_batch_size = public_batch_size
        self.received = TensorDict(persistent=False)  # targets, for the time of a fit

    def receive(self, broadcast: PublicBroadcast) -> None:
        """Take over the targets."""
        super().receive(broadcast)
        self.received.assign({} if broadcast.targets is None else {"targets": broadcast.targets})

    def before_fit(self, context: FitContext) -> None:
        """Attach the targets to the round's public samples."""
        targets = self.received.as_state()
        if targets:
            assert context.public is not None
            context.public.of_round(context.round).attach(targets["targets"])

    def phases(self) -> tuple[Phase, ...]:
        """Digest, where there are targets, then revisit the own samples."""
        revisit = Phase("revisit", epochs=self.revisit_epochs(), losses=("cross_entropy",))
        if not len(self.received) or self.digest_epochs == 0:
            return (revisit,)
        size, losses = self.public_batch_size, ("distillation",)
        return (Phase("digest", ("*",), self.digest_epochs, batch_size=size, losses=losses, source="public"), revisit)

    def revisit_epochs(self) -> int:
        """Epochs on the own samples in this round."""
        return self.epochs

    @abstractmethod
    def distance(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Loss of scores (N, C) against targets (N, C)."""

    @abstractmethod
    def said(self, scores: Tensor) -> Tensor:
        """What of scores (N, C) is sent."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The distance to the targets on public samples, the usual loss on own ones."""
        if self.phase.source == "own":
            return super().training_step(batch, batch_idx)
        inputs, _, targets = batch
        return self.sum_of_terms({"distillation": self.distance(self(inputs), targets)})

    def make_update(self, context: FitContext, before: Any) -> PublicUpdate:
        """What the trained model says of S_{r+1}."""
        assert context.public is not None
        scores = self._scores(context.public.of_round(context.round + 1))
        return PublicUpdate(**vars(super().make_update(context, before)), scores=scores)

    @torch.no_grad()
    def _scores(self, data: FitData) -> Tensor:
        """What is sent of all samples, (S, C), by the model in evaluation mode."""
        with evaluating(self), data.forward_context():
            chunks = [self(data.convert_input(chunk)) for chunk in data.tensors()[0].split(data.eval_batch_size)]
        return self.said(torch.cat(chunks).to(self.statistics_like()))
