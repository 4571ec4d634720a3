"""FedMD: heterogeneous federated learning by model distillation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_choice
from pfl_lightning.client import Batch, Citation, FitContext, Phase
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional import RunningAverage
from pfl_lightning.methods._public import DistillingClient, PublicBroadcast, PublicOptions, PublicUpdate
from pfl_lightning.options import Unpack
from pfl_lightning.server import Aggregator


class FedMD(DistillingClient):
    """Clients of any architecture agree on the scores of public samples; no weights are shared.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; encoders may differ.
        num_classes: Number of classes, C.
        public_samples: Public samples of a round, |S|, out of those of the data module (``public=...``).
        norm: ``"l1"``, the mean absolute error of the scores (published implementation), or ``"l2"``, the mean squared
            error (FL-bench).
        warmup_epochs: Epochs on the classes of the public samples with which a client's first fit begins, and then as
            many on its own samples (the paper's start). Whoever owns the public samples must know their classes.
        options: ``digest_epochs``, epochs on the public samples towards the consensus (1; 0 is local training),
            ``public_batch_size`` (256), and arguments of :class:`~pfl_lightning.client.FederatedClient`; ``epochs`` are
            for own samples.
    """

    citation = Citation(
        "FedMD: Heterogenous Federated Learning via Model Distillation", "Li and Wang", "NeurIPS workshop", 2019
    )
    not_exported = ("begun",)

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        public_samples: int = 5000,
        norm: str = "l1",
        warmup_epochs: int = 0,
        **options: Unpack[PublicOptions],
    ) -> None:
        super().__init__(encoder, num_classes, public_samples=public_samples, **options)
        check_choice("norm", norm, ("l1", "l2"))
        check_at_least("warmup_epochs", warmup_epochs, 0)
        self.norm, self.warmup_epochs = norm, warmup_epochs
        self.begun: Tensor
        if warmup_epochs > 0:
            self.register_buffer("begun", torch.tensor(False))  # personal: whether the client has had a fit

    def begins(self) -> bool:
        """Whether the client's fit is its first one, and begins by the warm-up."""
        return self.warmup_epochs > 0 and not bool(self.begun)

    def before_fit(self, context: FitContext) -> None:
        """Attach the consensus to the round's public samples, or in a first fit their classes."""
        if not self.begins():
            super().before_fit(context)
            return
        assert context.public is not None
        public = context.public.of_round(context.round)
        classes = getattr(public.part, "classes", None)
        if classes is None:
            raise ConfigurationError(
                "FedMD with warmup_epochs trains on the classes of public samples, and those of this data module have "
                "none: hold training samples back (public=, a number or a share), or leave warmup_epochs out"
            )
        public.attach(classes)

    def phases(self) -> tuple[Phase, ...]:
        """Digest and revisit; a first fit learns the public samples' classes, then its own, and digests nothing."""
        if not self.begins():
            return super().phases()
        epochs, losses = self.warmup_epochs, ("cross_entropy",)
        revisit = Phase("revisit", epochs=self.revisit_epochs(), losses=losses)
        public = Phase(
            "public warm-up", ("*",), epochs, batch_size=self.public_batch_size, losses=losses, source="public"
        )
        return (public, Phase("own warm-up", epochs=epochs, losses=losses), revisit)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """The distance to the consensus on public samples, or their classes' loss; the usual loss on own ones."""
        if self.phase.source == "own" or self.uses("distillation"):
            return super().training_step(batch, batch_idx)
        inputs, _, classes = batch
        return self.sum_of_terms({"cross_entropy": F.cross_entropy(self(inputs), classes)})

    def make_update(self, context: FitContext, before: Any) -> PublicUpdate:
        """What the trained model says of the next round's public samples."""
        if self.warmup_epochs > 0:
            self.begun.fill_(True)
        return super().make_update(context, before)

    def distance(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Digest: the mean distance to the consensus, over samples and classes."""
        return F.l1_loss(scores, targets) if self.norm == "l1" else F.mse_loss(scores, targets)

    def said(self, scores: Tensor) -> Tensor:
        """Communicate: the scores as they are."""
        return scores


class FedMDAggregator(Aggregator, of=FedMD):
    """Averages what the clients of the cohort say of the next round's public samples: the consensus."""

    update_class = PublicUpdate

    def __init__(self, client: FedMD, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.sizes["S"], self.takes_scores = client.public_samples, True
        self.consensus: Tensor
        self.consensus_round: Tensor
        self.register_buffer("consensus", torch.zeros(client.public_samples, client.num_classes))
        self.register_buffer("consensus_round", torch.tensor(-1))  # whose samples it belongs to
        self.running_average, self._next = RunningAverage(), -1

    def broadcast(self, client: int, round: int) -> PublicBroadcast:
        """Distribute: the consensus on S_r, the same for every client."""
        known = int(self.consensus_round) == round
        return PublicBroadcast(client=client, round=round, targets=self.consensus if known else None)

    def receive(self, update: PublicUpdate) -> None:
        """Add one client's scores to the mean."""
        assert update.scores is not None
        self.running_average.update({"scores": update.scores}, 1)
        self._next = update.round + 1

    def aggregate(self) -> None:
        """Aggregate: the plain mean of the scores."""
        average, following = self.running_average, self._next
        self.running_average, self._next = RunningAverage(), -1
        if average.total_weight > 0:
            # Another tensor: the last one may be in a message that is still on its way.
            self.consensus = average.result()["scores"].to(self.consensus)
            self.consensus_round = torch.full_like(self.consensus_round, following)
