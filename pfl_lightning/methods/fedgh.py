"""FedGH: a generalized global header."""

from __future__ import annotations

import copy

import torch
from torch import nn

from pfl_lightning.checks import check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.methods._class_means import (
    ClassMeansUpdate,
    class_means_update,
    descend,
    finite_or_before,
    server_head,
)
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import Aggregator
from pfl_lightning.state.tensors import select_state


class FedGH(FederatedClient):
    """Encoders stay on the clients; the server trains the head that all start from on the clients' class means.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; encoders may differ, their feature width may not.
        num_classes: Number of classes, C.
        server_lr: Learning rate of the head on the server; 0 leaves it as it started (published implementation).
        server_steps: ``"client"`` takes one step for each client, on the mean over its classes, ``"class"`` one for
            each class mean of each client (the order of the published implementation).
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`. ``eval_model`` is ``"trained"``: a
            client is evaluated with the model that its local fit gives, not by the server's head on an encoder that the
            head has never seen.
    """

    citation = Citation(
        "FedGH: Heterogeneous Federated Learning with Generalized Global Header", "Yi et al.", "ACM MM", 2023
    )
    feature_based = True
    scores_features = True
    shared = ("head.*",)
    batch_norm = "own"
    eval_model = "trained"

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        server_lr: float = 0.01,
        server_steps: str = "client",
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("server_lr", server_lr)
        check_choice("server_steps", server_steps, ("client", "class"))
        self.server_lr, self.server_steps = server_lr, server_steps

    def configure_aggregator(self, num_clients: int) -> FedGHAggregator:
        """The server of FedGH."""
        return FedGHAggregator(self, num_clients)

    def make_update(self, context: FitContext, before: None) -> ClassMeansUpdate:
        """Class means at the trained encoder; neither the encoder nor the head."""
        return class_means_update(self, context)


class FedGHAggregator(Aggregator):
    """Trains the head by gradient descent on the class means of each client of the cohort, one after the other."""

    update_class = ClassMeansUpdate

    def __init__(self, client: FedGH, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.expected_weights = {}  # clients upload class means, and not the head
        self.head, self._names = server_head(client)
        self._prefix = client.head_prefix
        self.lr, self.by_class = client.server_lr, client.server_steps == "class"
        self._round = 0
        self._next: tuple[nn.Linear, ...] = ()  # at most one; in a tuple, it is no part of the state that is saved

    def broadcast(self, client: int, round: int) -> Broadcast:
        """The global head, the same for every client."""
        own = select_state(self.head, self._names)
        weights = {f"{self._prefix}{name}": value for name, value in own.items()}
        return Broadcast(client=client, round=round, weights=weights)

    def receive(self, update: ClientUpdate) -> None:
        """Steps on the client's class means, on a copy: the head that is sent changes between rounds."""
        assert isinstance(update, ClassMeansUpdate)
        if not self._next:
            self._next = (copy.deepcopy(self.head),)
        self._round, weight = update.round, next(self.head.parameters())
        means, classes = update.means.to(weight), update.classes.to(weight.device)
        size = 1 if self.by_class else max(len(classes), 1)
        with torch.autocast(weight.device.type, enabled=False):
            for rows, labels in zip(means.split(size), classes.split(size), strict=True):
                descend(self._next[0], rows, labels, self.lr, self._names)

    def aggregate(self) -> None:
        """Take over the trained head."""
        if self._next:
            (trained,), self._next = self._next, ()
            self.head, self._round = finite_or_before(trained, self.head, self._round), 0
