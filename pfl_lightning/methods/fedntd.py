"""FedNTD: distillation of the classes that a sample does not have."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_number
from pfl_lightning.client import Batch, Citation, FederatedClient, FitContext
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.fit.context import RunFacts
from pfl_lightning.functional import kl_divergence
from pfl_lightning.methods._frozen_copy import FrozenCopy
from pfl_lightning.options import ClientOptions, Unpack


class FedNTD(FederatedClient):
    """FedAvg that keeps what the global model says of the classes other than a sample's own.

    Local training forgets classes that a client lacks. The received model teaches the local one their scores, those of
    each sample without its true class.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C, at least 3: of two, a sample has one other class, whose probability is 1.
        beta: Weight of the distillation; 0 is FedAvg.
        temperature: tau, by which both models' scores are divided.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
        "Lee et al.",
        "NeurIPS",
        2022,
    )
    batch_norm = "shared"
    averages_samples = True
    loss_names = ("cross_entropy", "not_true_distillation")
    personalization_losses = ("cross_entropy",)

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        beta: float = 1.0,
        temperature: float = 1.0,
        **options: Unpack[ClientOptions],
    ) -> None:
        check_number("beta", beta)
        check_number("temperature (tau)", temperature, strict=True)
        super().__init__(encoder, num_classes, **options)
        self.beta, self.temperature = beta, temperature
        self.received = FrozenCopy(self.encoder, self.head, persistent=False)  # w^t, for the time of a fit

    def check_run(self, facts: RunFacts) -> None:
        """Refuse two classes, of which nothing can be distilled."""
        if self.num_classes < 3 and self.beta > 0:
            raise ConfigurationError(
                f"FedNTD needs at least 3 classes, got {self.num_classes}: it distills the classes that a sample does "
                "not have, and a single one always has probability 1. Use FedAvg or FedProx, or beta=0"
            )

    def before_fit(self, context: FitContext) -> None:
        """Keep the received model as it is, the teacher."""
        self.received.take_over(self.encoder, self.head)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """L_CE + beta L_NTD (4)."""
        inputs, labels = batch
        scores = self.classify(self.encode(inputs))
        terms = {}
        if self.uses("cross_entropy"):
            terms["cross_entropy"] = F.cross_entropy(scores, labels)
        if self.uses("not_true_distillation"):
            teacher, pupil = (not_true_scores(found, labels) for found in (self.received(inputs), scores))
            divergence = kl_divergence(teacher / self.temperature, pupil / self.temperature)  # (5)
            terms["not_true_distillation"] = self.beta * divergence
        return self.sum_of_terms(terms)


def not_true_scores(scores: Tensor, labels: Tensor) -> Tensor:
    """Scores of the classes that the samples do not have, in the order of the classes.

    Args:
        scores: (N, C).
        labels: (N,) the true classes.

    Returns:
        (N, C - 1).

    Example:
        >>> import torch
        >>> from pfl_lightning.methods.fedntd import not_true_scores
        >>> not_true_scores(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([1, 2]))
        tensor([[1., 3.],
                [4., 5.]])
    """
    places = torch.arange(scores.shape[1] - 1, device=scores.device)
    return scores.gather(1, places + (places >= labels[:, None]))
