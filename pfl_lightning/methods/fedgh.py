"""FedGH: a generalized global header."""

from __future__ import annotations

from torch import nn

from pfl_lightning.checks import check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.messages import Broadcast
from pfl_lightning.methods._class_means import ClassMeansUpdate, HeadAggregator, class_means_update
from pfl_lightning.options import ClientOptions, Unpack


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

    def make_update(self, context: FitContext, before: None) -> ClassMeansUpdate:
        """Class means at the trained encoder; neither the encoder nor the head."""
        return class_means_update(self, context)


class FedGHAggregator(HeadAggregator, of=FedGH):
    """Trains the head by gradient descent on the class means of each client of the cohort, one after the other."""

    def __init__(self, client: FedGH, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.by_class = client.server_steps == "class"

    def broadcast(self, client: int, round: int) -> Broadcast:
        """The global head, the same for every client."""
        return Broadcast(client=client, round=round, weights=self.head_weights())

    def receive(self, update: ClassMeansUpdate) -> None:
        """Steps on the client's class means."""
        super().receive(update)
        size = 1 if self.by_class else max(len(update.classes), 1)
        for means, classes in zip(update.means.split(size), update.classes.split(size), strict=True):
            self.descend(means, classes)
