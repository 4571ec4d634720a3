"""FedMTL: every client's model is a task of its own, and a term of the loss holds all of them near their mean."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.functional import RunningAverage, proximal_term
from pfl_lightning.messages import Broadcast, ClientUpdate
from pfl_lightning.methods._cohort import CohortAggregator
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.state.client_states import ClientStates
from pfl_lightning.state.tensors import TensorDict, select_state


class FedMTL(FederatedClient):
    """Multi-task learning: every client keeps its own model, and no model is replaced by an average.

    W = [w_1, ..., w_m] has the parameters of the m clients that take part as columns. Client k trains its column on

        F_k(w_k) + lambda tr(W Omega W^T),    Omega = (I - 11^T / m)^2

    with the others as they were last sent. I - 11^T / m is a symmetric projection, so that Omega = I - 11^T / m. A row
    of W Omega is that row less its mean, and the trace is sum_j ||w_j - w'||^2, where w' is the mean of all columns.
    Let o be the mean of the other m - 1 columns. Then w_k - w' = (1 - 1 / m) (w_k - o), and the trace is

        (1 - 1 / m) ||w_k - o||^2 + a constant, with the gradient 2 (1 - 1 / m) (w_k - o) = 2 (w_k - w').

    So o is all that the server has to send.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        lam: lambda, the weight of the trace; 0 is local training.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`. ``eval_model`` is ``"trained"``:
            clients are evaluated with their own models, and ``"aggregated"`` is refused. ``batch_norm``: buffers never
            travel, so that ``"shared"`` is as ``"own_statistics"``.
    """

    citation = Citation("Federated Multi-Task Learning", "Smith et al.", "NeurIPS", 2017)
    model_agnostic = True
    batch_norm = "own_statistics"
    shares_buffers = False
    eval_model = "trained"
    eval_models = ("trained",)  # clients never load what the server sends
    averages_samples = True
    loss_names = ("cross_entropy", "relationship")
    personalization_losses = ("cross_entropy",)

    strength: Tensor

    def __init__(
        self, encoder: nn.Module, num_classes: int, *, lam: float = 0.1, **options: Unpack[ClientOptions]
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("lam (lambda)", lam)
        self.lam = lam
        self.others = TensorDict(persistent=False)  # o, for the time of a fit
        self.register_buffer("strength", torch.zeros(()), persistent=False)  # lambda (1 - 1 / m), for the time of a fit

    def receive(self, broadcast: Broadcast) -> None:
        """Keep o for the loss; the model is the client's own."""
        own = dict(self.named_parameters())
        # In the memory layout of the parameters, which steps are quicker with.
        self.others.assign({name: torch.empty_like(own[name]).copy_(o) for name, o in broadcast.weights.items()})

    def before_fit(self, context: FitContext) -> None:
        """Set lambda (1 - 1 / m); a client that is alone has 0."""
        self.strength = torch.full_like(self.strength, self.lam * (1 - 1 / context.facts.num_participating))

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """F_k(w_k) + lambda tr(W Omega W^T), without what does not depend on w_k."""
        terms = super().loss_terms(features, labels)
        if self.uses("relationship"):
            others = self.others.as_state()
            own = {name: p for name, p in self.named_parameters() if name in others}
            terms["relationship"] = self.strength * proximal_term(own, {name: others[name] for name in own})
        return terms


class FedMTLAggregator(CohortAggregator, of=FedMTL):
    """Keeps every client's last weights, initial ones until it has trained, and sends each the mean of the others."""

    def __init__(self, client: FedMTL, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.models = ClientStates(select_state(client, client.shared_names()), num_clients)
        self.mean = TensorDict(self.models.initial)  # w', of all that take part

    def broadcast(self, client: int, round: int) -> Broadcast:
        """O = w' + (w' - w_k) / (m - 1); a novel client, which has no column, gets w'."""
        weights, m = self.mean.as_state(), self.facts.num_participating
        if client not in self.facts.novel and m > 1:
            own = self.models.get(client)
            weights = {name: mean + (mean - own[name].to(mean.device)) / (m - 1) for name, mean in weights.items()}
        return Broadcast(client=client, round=round, weights=weights)

    def combine(self, cohort: list[ClientUpdate]) -> None:
        """Take over the cohort's columns, and the mean of all m."""
        for update in cohort:
            self.models.set(update.client, update.weights)
        written = [client for client in range(self.num_clients) if self.models.written(client)]
        mean = RunningAverage()
        mean.update(self.models.initial, self.facts.num_participating - len(written))
        for client in written:
            mean.update(self.models.get(client), 1)
        self.mean.assign(mean.result())
