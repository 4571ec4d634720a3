"""FD: federated distillation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.functional import ClassStatistics
from pfl_lightning.functional.inner_loop import evaluating
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.messages import Broadcast, ClientUpdate, statistics_field
from pfl_lightning.methods._class_means import ReceivedMeans, finite_features
from pfl_lightning.methods._cohort import CohortAggregator
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.state.client_states import ClientStates


@dataclass(frozen=True, kw_only=True)
class FDBroadcast(Broadcast):
    """What the others' models give on samples of each class; no weights.

    Attributes:
        classes: Classes that another client of the last cohort has, (K,), int64, ascending; of a client that took part
            before, its own ones alone.
        scores: Mean scores of the others' models on their samples of these classes, (K, C).
    """

    classes: Tensor = statistics_field(shape="K", dtype=torch.int64, at_least=0, below="C")
    scores: Tensor = statistics_field(shape="K C", floating=True)


@dataclass(frozen=True, kw_only=True)
class FDUpdate(ClientUpdate):
    """What the trained model gives on the client's samples of each class; no weights.

    Attributes:
        classes: Classes of the client, (K,), int64, ascending.
        scores: Mean scores of its samples of these classes, (K, C).
        counts: Their numbers of samples, n_kc, (K,), int64; where they weigh.
    """

    classes: Tensor = statistics_field(
        shape="K", dtype=torch.int64, at_least=0, below="C", ascending=True, tells="label presence"
    )
    scores: Tensor = statistics_field(shape="K C", floating=True, tells="class scores")
    counts: Tensor | None = statistics_field(
        shape="K", dtype=torch.int64, at_least=1, total="num_samples", when="by_samples", tells="class counts"
    )


class FD(FederatedClient):
    """Nothing but mean class scores is shared; a model is distilled from what the others' give on samples of a class.

    A class that no other client of the last cohort has gives no term.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; encoders may differ, in their width, too.
        num_classes: Number of classes, C.
        gamma: Weight of the distillation; 0 is local training.
        average: What is averaged and sent: ``"scores"``, of whose mean a softmax makes the target, or
            ``"probabilities"``, whose mean is the target.
        by_samples: Whether a client's means count by its samples of the class; otherwise all count the same.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation under "
        "Non-IID Private Data",
        "Jeong et al.",
        "arXiv",
        2018,
    )
    feature_based = True
    scores_features = True
    shared = ()
    batch_norm = "own"
    eval_model = "trained"
    averages_samples = True
    loss_names = ("cross_entropy", "distillation")
    personalization_losses = ("cross_entropy",)

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        gamma: float = 1.0,
        average: str = "scores",
        by_samples: bool = False,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("gamma", gamma)
        check_choice("average", average, ("scores", "probabilities"))
        self.gamma, self.average, self.by_samples = gamma, average, by_samples
        self.others = ReceivedMeans(num_classes, num_classes)  # F_y

    def receive(self, broadcast: FDBroadcast) -> None:
        """Take over the others' mean scores."""
        self.others.take(broadcast.scores, broadcast.classes)

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """CE(F(x), y) + gamma CE(F(x), softmax(F_y)), a mean over all samples, also those of classes without F_y."""
        terms = super().loss_terms(features, labels)
        if self.gamma > 0 and self.uses("distillation"):
            scores, received = self.classify(features), self.others.means[labels]
            scores = at_least_single(scores)
            targets = received.to(scores.dtype)
            if self.average == "scores":
                targets = targets.softmax(dim=1)
            distances = F.cross_entropy(scores, targets, reduction="none")
            terms["distillation"] = self.gamma * (distances * self.others.present[labels]).mean()
        return terms

    @torch.no_grad()
    def make_update(self, context: FitContext, before: None) -> FDUpdate:
        """The trained model's mean scores on the own samples of each class."""
        features, labels = finite_features(self, context)
        with evaluating(self.head):  # a user's head may have dropout
            scores = self.classify(features.to(self.statistics_like()))
        if self.average == "probabilities":
            scores = scores.softmax(dim=1)
        statistics = ClassStatistics(self.num_classes, self.num_classes)
        statistics.update(scores, labels)
        classes = statistics.counts.nonzero().flatten()
        return FDUpdate(
            **vars(super().make_update(context, before)),  # without weights
            classes=classes,
            scores=statistics.means[classes].to(self.statistics_like()),
            counts=statistics.counts[classes] if self.by_samples else None,
        )


class FDAggregator(CohortAggregator, of=FD):
    """Gives each client the mean, class by class, of what the others of the last cohort have sent."""

    update_class = FDUpdate

    def __init__(self, client: FD, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.by_samples, self.dtype = client.by_samples, client.statistics_like().dtype
        classes = client.num_classes
        nothing = {
            "sums": torch.zeros(classes, classes, dtype=torch.float64),
            "weights": torch.zeros(classes, dtype=torch.float64),
            "round": torch.full((), -1, dtype=torch.int64),
        }
        # On the host and in double precision, whatever the run's: a client's own part is subtracted.
        self.sent = ClientStates(nothing, num_clients)  # by each client, in its last round
        self.total = ClientStates(nothing, 1)  # of the last cohort

    def broadcast(self, client: int, round: int) -> FDBroadcast:
        """The mean over the others, of classes that the client has as far as it is known."""
        total, own = self.total.get(0), self.sent.get(client)
        sums, weights = total["sums"], total["weights"]
        wanted = torch.ones_like(weights, dtype=torch.bool)
        if self.sent.written(client):
            wanted = own["weights"] > 0
            if own["round"] == total["round"]:  # it is part of the sums
                sums, weights = sums - own["sums"], weights - own["weights"]
        classes = ((weights > 0) & wanted).nonzero().flatten()
        scores = (sums[classes] / weights[classes, None]).to(self.dtype)
        return FDBroadcast(client=client, round=round, classes=classes, scores=scores)

    def combine(self, cohort: list[FDUpdate]) -> None:
        """Sum up the cohort's scores of each class; within the round the sums of the last one were sent."""
        total = {name: tensor.clone() for name, tensor in self.total.initial.items()}
        number = int(self.total.get(0)["round"]) + 1  # counted here, since rounds of another fit begin at 0 again
        total["round"].fill_(number)
        for update in cohort:
            own = {name: tensor.clone() for name, tensor in self.sent.initial.items()}
            classes = update.classes.cpu()
            counts = torch.ones(len(classes)) if update.counts is None else update.counts.cpu()
            own["weights"][classes] = counts.double()
            own["sums"][classes] = counts.double()[:, None] * update.scores.cpu().double()
            own["round"].fill_(number)
            total["weights"] += own["weights"]
            total["sums"] += own["sums"]
            self.sent.set(update.client, own)
        self.total.set(0, total)
