"""kNN-Per: personalization by local memorization."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_at_least, check_between, check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional import neighbor_probabilities
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.functional.tensor_lists import float64_device
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.phases import Personalization
from pfl_lightning.state.tensors import TensorDict

_STALE = (
    "KNNPer compares samples with stored features of the received encoder, which {} would change before the "
    "evaluation: use {}"
)

WEIGHTS = tuple(step / 10 for step in range(11))
"""Values of lambda that a client chooses from."""

FLOOR = torch.finfo(torch.float32).tiny
"""Least probability of a class among the neighbors: its logarithm is finite."""


class KNNPer(FederatedClient):
    """FedAvg, whose model each client mixes with the nearest of its own training samples when it predicts.

    Training is FedAvg. Before an evaluation a client stores the features and classes of its own training samples. The
    class probabilities are lambda p_knn + (1 - lambda) p_model, where the k nearest stored samples count by
    e^(-distance / (d scale)), d being the width of the features. Scores are their logarithms. Novel clients need no
    training for it.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        k: Nearest samples that count; all of them where a client stores fewer, of which a fit warns.
        weight: lambda, in [0, 1], of all clients. ``None``: each client takes, of 0, 0.1, ..., 1, the value of least
            loss on its validation part, and 0.5 where it has none.
        scale: Scale of the distances; a larger one lets far neighbors count more alike.
        distance: ``"squared"`` Euclidean distances in the exponent (published implementation), or ``"euclidean"``
            ones (the paper).
        capacity: Share of the training samples that is stored, drawn at random; at least one sample.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation("Personalized Federated Learning through Local Memorization", "Marfoq et al.", "ICML", 2022)
    batch_norm = "shared"

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        k: int = 10,
        weight: float | None = None,
        scale: float = 1.0,
        distance: str = "squared",
        capacity: float = 1.0,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        if self.fine_tune == "all":
            raise ConfigurationError(_STALE.format("fine_tune='all'", "fine_tune='head'"))
        check_at_least("k", k, 1)
        check_between("weight (lambda)", weight, 0, 1, optional=True)
        check_number("capacity", capacity, strict=True)
        check_between("capacity", capacity, 0, 1)
        check_number("scale", scale, strict=True)
        check_choice("distance", distance, ("squared", "euclidean"))
        self.k, self.weight, self.scale, self.distance, self.capacity = k, weight, scale, distance, capacity
        self.datastore = TensorDict(persistent=False)  # features, labels and lambda, for the time of an evaluation

    def check_samples(self, samples: Mapping[int, int]) -> None:
        """Say of how many clients all stored samples count."""
        stored = {client: self._stored_of(number) for client, number in samples.items()}
        fewer = [client for client, number in stored.items() if number < self.k]
        if fewer:
            least = min(fewer, key=lambda client: stored[client])
            warnings.warn(
                f"KNNPer: {len(fewer)} of {len(stored)} clients store fewer than k = {self.k} samples (client {least}: "
                f"{stored[least]}), so all their samples count as neighbors; use a smaller k to let the "
                "near ones decide",
                stacklevel=2,
            )

    def _stored_of(self, samples: int) -> int:
        """How many of so many training samples are stored."""
        return max(1, round(self.capacity * samples))

    def check_personalization(self, personalization: Personalization) -> None:
        """Refuse one that changes the encoder, whose features are stored."""
        if personalization.train in ("all", "linear+encoder"):
            got = f"a personalization with train={personalization.train!r}"
            raise ConfigurationError(_STALE.format(got, "train='head', or 'linear' for a new head without neighbors"))

    def exported_names(self) -> list[str]:
        """The model alone, with a warning: what is stored of the training samples is not part of it."""
        warnings.warn(
            "an exported client of KNNPer is its model without the stored training samples: it predicts like FedAvg "
            "(lambda = 0); export FedAvg, or evaluate in the federation",
            stacklevel=3,
        )
        return super().exported_names()

    def before_evaluation(self, context: FitContext) -> None:
        """Store (f(x_i), y_i) of the own training samples, and choose lambda."""
        features, labels = self.features_of(context.data)
        usable = features.isfinite().all(dim=1)
        features, labels = features[usable], labels[usable]
        if not len(labels):  # the model alone
            self.datastore.assign({})
            return
        count = self._stored_of(len(labels))
        if count < len(labels):
            kept = torch.randperm(len(labels))[:count].sort().values.to(labels.device)
            features, labels = features[kept], labels[kept]
        place = float64_device(labels.device)
        weight = torch.tensor(0.5 if self.weight is None else self.weight, dtype=torch.float64, device=place)
        self.datastore.assign({"features": features, "labels": labels, "weight": weight})
        validation = context.validation
        if self.weight is None and validation is not None:
            found = self.features_of(validation)
            with context.data.forward_context():
                weight = self._best_weight(*found, validation.eval_batch_size)
            self.datastore.assign({"features": features, "labels": labels, "weight": weight})

    def _best_weight(self, features: Tensor, labels: Tensor, batch_size: int) -> Tensor:
        """The value of lambda with the least loss on given samples; the smallest one of ties."""
        pieces = [self._log_probabilities(piece) for piece in features.split(batch_size)]
        neighbors, model = (torch.cat(of) for of in zip(*pieces, strict=True))
        values = torch.tensor(WEIGHTS, dtype=model.dtype, device=model.device)
        losses = torch.stack([F.nll_loss(_mixed(neighbors, model, weight), labels) for weight in values])
        return values[losses.argmin()]

    def classify(self, features: Tensor) -> Tensor:
        """Scores (N, C): those of the model in training; log(lambda p_knn + (1 - lambda) p_model) in an evaluation."""
        if self.training or len(self.datastore) == 0:
            return super().classify(features)
        return _mixed(*self._log_probabilities(features), self.datastore.as_state()["weight"])

    def _log_probabilities(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of p_knn and of p_model, (N, C) each."""
        scores = at_least_single(super().classify(features))
        store = self.datastore.as_state()
        probabilities = neighbor_probabilities(
            store["features"],
            store["labels"],
            features,
            self.num_classes,
            neighbors=self.k,
            scale=features.shape[1] * self.scale,
            squared=self.distance == "squared",
        )
        found = probabilities.clamp(min=FLOOR).log().to(scores)
        return found, scores.log_softmax(dim=-1)


def _mixed(neighbors: Tensor, model: Tensor, weight: Tensor) -> Tensor:
    """log(lambda p_knn + (1 - lambda) p_model), of logarithms; exactly one of them for lambda 0 and 1."""
    shares = torch.stack([weight.log(), torch.log1p(-weight)]).to(model)
    return torch.logaddexp(shares[0] + neighbors, shares[1] + model)
