"""FedTGP: trainable global prototypes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.client import Citation
from pfl_lightning.learner import Learner, Objective
from pfl_lightning.methods._class_means import ClassMeansBroadcast, ClassMeansUpdate
from pfl_lightning.methods._cohort import CohortAggregator
from pfl_lightning.methods.fedproto import PrototypeClient
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.seeding import Purpose

EXACT = "donot_use_mm_for_euclid_dist"  # a product would lose small distances


class FedTGP(PrototypeClient):
    """FedProto's clients; the server trains prototypes that lie near the clients' and apart from one another.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; encoders may differ, their feature width may not.
        num_classes: Number of classes, C.
        alignment: lambda, the weight of the squared distance to the global prototypes, a mean over features.
        prediction: ``"prototype"`` predicts the class of the nearest global prototype, ``"classifier"`` by the client's
            own head. Both train in the same way.
        server_lr: Learning rate of the prototypes on the server.
        server_epochs: Passes over the uploaded prototypes in a round.
        server_batch_size: Uploaded prototypes in a step.
        max_margin: Largest margin between a prototype and those of other classes; 0 leaves the margin out.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data and Model "
        "Heterogeneity in Federated Learning",
        "Zhang et al.",
        "AAAI",
        2024,
    )

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        alignment: float = 10.0,
        prediction: str = "prototype",
        server_lr: float = 0.01,
        server_epochs: int = 100,
        server_batch_size: int = 10,
        max_margin: float = 100.0,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, alignment=alignment, prediction=prediction, **options)
        check_number("server_lr", server_lr, strict=True)
        check_at_least("server_epochs", server_epochs, 1)
        check_at_least("server_batch_size", server_batch_size, 1)
        check_number("max_margin", max_margin)
        self.server_lr, self.server_epochs, self.server_batch_size = server_lr, server_epochs, server_batch_size
        self.max_margin = max_margin


class TrainablePrototypes(nn.Module):
    """A prototype (d,) of each class, from a vector of the class through two linear layers.

    Args:
        num_classes: Number of classes, C.
        width: Width of the features, d.
    """

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(num_classes, width)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self) -> Tensor:
        """Prototypes, (C, d)."""
        prototypes: Tensor = self.layers(self.vectors.weight)
        return prototypes


class FedTGPAggregator(CohortAggregator, of=FedTGP):
    """Trains prototypes of all classes by contrast to those that the cohort uploads."""

    update_class = ClassMeansUpdate

    def __init__(self, client: FedTGP, num_clients: int) -> None:
        super().__init__(client, num_clients)
        classes, width = client.prototypes.means.shape
        self.epochs, self.batch_size = client.server_epochs, client.server_batch_size
        self.max_margin = client.max_margin
        sgd = partial(torch.optim.SGD, lr=client.server_lr)
        self.learner = Learner(TrainablePrototypes(classes, width), sgd)
        self.trained: Tensor
        self.register_buffer("trained", torch.zeros((), dtype=torch.bool))

    def broadcast(self, client: int, round: int) -> ClassMeansBroadcast:
        """The global prototypes of all classes, the same for every client; none before they were trained."""
        with self.learner.evaluating():
            means = self.learner.network()
        classes = torch.arange(len(means) if bool(self.trained) else 0, device=means.device)
        return ClassMeansBroadcast(client=client, round=round, means=means[classes], classes=classes)

    def takes_mean(self) -> bool:
        """Return whether one update may stand for the mean of a cohort, which it may."""
        return True

    def combine(self, cohort: list[ClassMeansUpdate]) -> None:
        """Train the global prototypes on the cohort's: class means (K, d) and classes (K,) of each client."""
        like, round = next(self.learner.network.parameters()), cohort[0].round
        uploaded = torch.cat([update.means.to(like) for update in cohort])
        classes = torch.cat([update.classes.to(like.device) for update in cohort])
        steps = self._steps(uploaded, classes, adaptive_margin(uploaded, classes, self.max_margin), round)
        if self.learner.learn(steps, round, "lower server_lr, or look for clients with very large features"):
            self.trained.fill_(True)

    def _steps(self, uploaded: Tensor, classes: Tensor, margin: float, round: int) -> Iterator[Objective]:
        generator = self.generator(Purpose.SERVER_BATCHES, round)
        for _ in range(self.epochs):
            order = torch.randperm(len(classes), generator=generator).to(classes.device)
            for batch in order.split(self.batch_size):
                yield partial(self._contrast, uploaded[batch], classes[batch], margin)

    def _contrast(self, uploaded: Tensor, classes: Tensor, margin: float) -> Tensor:
        """Cross entropy of minus the distances to all global prototypes; the own class must win by the margin."""
        distances = torch.cdist(uploaded, self.learner.network(), compute_mode=EXACT)
        own = F.one_hot(classes, distances.shape[1])
        return F.cross_entropy(-(distances + margin * own), classes)


def adaptive_margin(uploaded: Tensor, classes: Tensor, largest: float) -> float:
    """How far the most isolated class is from the next, by the means of its uploaded prototypes; ``largest`` at most.

    Args:
        uploaded: Prototypes of all clients, (N, d).
        classes: Their classes, (N,).
        largest: The margin where it would be larger, and of a single class.

    Example:
        >>> import torch
        >>> from pfl_lightning.methods.fedtgp import adaptive_margin
        >>> uploaded = torch.tensor([[0.0], [2.0], [4.0], [9.0]])  # the means are 1, 4 and 9
        >>> adaptive_margin(uploaded, torch.tensor([0, 0, 1, 2]), largest=100.0)
        5.0
    """
    centers = torch.stack([uploaded[classes == c].mean(dim=0) for c in classes.unique()])
    if len(centers) == 1:
        return largest
    distances = torch.cdist(centers, centers, compute_mode=EXACT).fill_diagonal_(torch.inf)
    return min(float(distances.amin(dim=1).max()), largest)
