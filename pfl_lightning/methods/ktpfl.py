"""KT-pFL: parameterized knowledge transfer for personalized federated learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.checks import check_learning_rate, check_number
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional import RunningAverage
from pfl_lightning.functional.numerics import at_least_single
from pfl_lightning.messages import ClientUpdate, State
from pfl_lightning.methods._cohort import CohortAggregator
from pfl_lightning.methods._public import DistillingClient, PublicBroadcast, PublicUpdate
from pfl_lightning.names import parameters_of
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import AggregationWeights
from pfl_lightning.state.client_states import ClientStates
from pfl_lightning.state.tensors import TensorDict, select_state


class KTpFL(DistillingClient):
    """Each client learns from its own mixture of what the others say; the server learns the coefficients c (m, m).

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`; encoders may differ, unless weights are shared.
        num_classes: Number of classes, C.
        weights: Whether clients share weights in place of what they say of public samples ("+weight").
        public_samples: Public samples of a round, |S|, out of those of the data module (``public=...``); none are used
            with ``weights``.
        digest_epochs: Epochs on the public samples, towards the own mixture; 0 is local training.
        public_batch_size: Public samples in a batch.
        temperature: Temperature of the softmax whose probabilities are sent and drawn to the mixture.
        distillation: Weight of the divergence, a sum over classes; 1 / C is the published mean over classes.
        rho: Weight of the distance of the coefficients to equal ones.
        server_lr: Step of the server on the coefficients, a round; 0 keeps them equal.
        sharpness: The coefficients become softmax(sharpness * c) after the step; ``None`` clamps them at 0 and
            divides by their sum.
        growing: Whether the epochs on own samples begin with one and grow by one a round, up to ``epochs``.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`; ``epochs`` are for own samples.
    """

    citation = Citation(
        "Parameterized Knowledge Transfer for Personalized Federated Learning", "Zhang et al.", "NeurIPS", 2021
    )
    eval_model = "trained"

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        weights: bool = False,
        public_samples: int = 3000,
        digest_epochs: int = 1,
        public_batch_size: int = 256,
        temperature: float = 10.0,
        distillation: float = 1.0,
        rho: float = 0.7,
        server_lr: float = 1.0,
        sharpness: float | None = 5.0,
        growing: bool = True,
        **options: Unpack[ClientOptions],
    ) -> None:
        if weights:
            if options.get("batch_norm") is None:
                options["batch_norm"] = "shared"
            names = ("public_samples", "digest_epochs", "public_batch_size", "temperature", "distillation")
            given = (public_samples, digest_epochs, public_batch_size, temperature, distillation)
            usual = parameters_of(KTpFL)
            if without := [name for name, value in zip(names, given, strict=True) if value != usual[name][0].default]:
                raise ConfigurationError(
                    f"KTpFL with weights=True uses no public samples: leave out {', '.join(without)}, or set weights "
                    "to False"
                )
        super().__init__(
            encoder,
            num_classes,
            public_samples=public_samples,
            digest_epochs=digest_epochs,
            public_batch_size=public_batch_size,
            **options,
        )
        check_number("temperature", temperature, strict=True)
        check_number("distillation", distillation)
        check_number("rho", rho)
        check_learning_rate("server_lr", server_lr)
        check_number("sharpness", sharpness, optional=True)
        self.weights, self.growing = weights, growing
        self.temperature, self.distillation = temperature, distillation
        self.rho, self.server_lr, self.sharpness = rho, server_lr, sharpness
        if weights:
            self.shared, self.public_samples = ("encoder.*", "head.*"), 0
        self.round: Tensor
        self.register_buffer("round", torch.tensor(0), persistent=False)  # whose epochs are to be known

    def receive(self, broadcast: PublicBroadcast) -> None:
        """Take over the own mixture, of probabilities or of weights."""
        super().receive(broadcast)
        self.round.fill_(broadcast.round)

    def revisit_epochs(self) -> int:
        """One epoch on the own samples in the first round, and one more each round, up to ``epochs``."""
        return min(int(self.round) + 1, self.epochs) if self.growing else self.epochs

    def distance(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The divergence KL(target, softmax(scores / T)), a mean over samples."""
        spoken = F.log_softmax(scores / self.temperature, dim=1)
        targets = targets.to(spoken)
        # Not F.kl_div, which vmap would compute client by client.
        return self.distillation * (torch.xlogy(targets, targets) - targets * spoken).sum(1).mean()

    def said(self, scores: Tensor) -> Tensor:
        """Probabilities p_k = softmax(scores / T)."""
        return (scores / self.temperature).softmax(1)

    def make_update(self, context: FitContext, before: Any) -> PublicUpdate:
        """What the trained model says of the next round's public samples, or its weights."""
        if not self.weights:
            return super().make_update(context, before)
        return PublicUpdate(**vars(FederatedClient.make_update(self, context, before)))


class KTpFLAggregator(CohortAggregator, of=KTpFL):
    """Learns how much each client takes from each other, and mixes what the last cohort has sent.

    The row of a client, restricted to the last cohort and divided by its sum, says what the client gets.
    """

    update_class = PublicUpdate
    idle_broadcast = PublicBroadcast

    def __init__(self, client: KTpFL, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.takes_scores = not client.weights
        self.server_lr, self.rho, self.sharpness = client.server_lr, client.rho, client.sharpness
        shared = select_state(client, client.shared_names())
        self.learned_from = [name for name, _ in client.named_parameters() if name in shared]
        if self.takes_scores:
            self.sizes["S"] = client.public_samples
            spoken = at_least_single(client.statistics_like()).new_zeros(client.public_samples, client.num_classes)
            shared, self.learned_from = {"scores": spoken}, ["scores"]
        self.sent = ClientStates(shared, num_clients)
        # c_ij as multiples of 1 / m, of the clients that have taken part; the others' are 1.
        none, factors = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0)
        self.learned = TensorDict({"clients": none, "factors": factors, "last": none.clone()})
        self.last_round: Tensor
        self.register_buffer("last_round", torch.tensor(-1))

    def coefficients(self, clients: Sequence[int], others: Sequence[int]) -> Tensor:
        """Coefficients c_ij of some clients (N) for others (M), as multiples of 1 / m: (N, M) on the CPU."""
        known, factors = self.learned.as_state()["clients"].tolist(), self.learned.as_state()["factors"].cpu()
        place = {client: row for row, client in enumerate(known)}
        rows, columns = (torch.tensor([place.get(client, -1) for client in ids]) for ids in (clients, others))
        found = torch.ones(len(clients), len(others), dtype=torch.float64)
        own, theirs = (places.ge(0).nonzero().flatten() for places in (rows, columns))
        if len(own) and len(theirs):
            found[own[:, None], theirs] = factors[rows[own][:, None], columns[theirs]].to(found)
        return found

    def broadcast(self, client: int, round: int) -> PublicBroadcast:
        """The client's own mixture: sum_j c_ij p_j of S_r, or sum_j c_ij w_j."""
        if not self.takes_scores:
            return PublicBroadcast(client=client, round=round, weights=self._mixture(client) or self.sent.get(client))
        known = int(self.last_round) + 1 == round
        return PublicBroadcast(
            client=client, round=round, targets=self._mixture(client).get("scores") if known else None
        )

    def receive(self, update: ClientUpdate) -> None:
        """Keep what a client of the cohort has sent, weights on the host."""
        super().receive(replace(update, weights={name: value.cpu() for name, value in update.weights.items()}))

    def combine(self, cohort: list[PublicUpdate]) -> None:
        """One step on the coefficients of the cohort; the others' stay."""
        clients = [update.client for update in cohort]
        contents = [u.weights if u.scores is None else {"scores": u.scores.cpu()} for u in cohort]
        gram, width = gram_of([{name: content[name] for name in self.learned_from} for content in contents])
        own = self.coefficients(clients, clients)
        stepped = transfer_step(shares_of(own), gram, width, self.server_lr, self.rho, self.sharpness)
        if self.sharpness is None:
            stepped = shares_of(stepped)  # a plain step leaves the simplex
        self._learn(clients, stepped * own.sum(1, keepdim=True))  # what they take from other clients stays as it is
        self.aggregation_weights = AggregationWeights(tuple(clients), stepped)
        for update, content in zip(cohort, contents, strict=True):
            self.sent.set(update.client, content)
        self.last_round.fill_(cohort[0].round)

    def _learn(self, cohort: list[int], factors: Tensor) -> None:
        """Take over the factors (M, M) of a cohort, which is the last one now."""
        state = self.learned.as_state()
        known = state["clients"].tolist()
        before = set(known)
        known += [client for client in cohort if client not in before]
        grown, place = self.coefficients(known, known), {client: row for row, client in enumerate(known)}
        rows = torch.tensor([place[client] for client in cohort])
        grown[rows[:, None], rows] = factors
        clients, last = (torch.tensor(ids).to(state["clients"]) for ids in (known, cohort))
        self.learned.assign({"clients": clients, "factors": grown.to(state["factors"]), "last": last})

    def has_client_weights(self) -> bool:
        """Return true: each client has coefficients of its own."""
        return True

    def _mixture(self, client: int) -> dict[str, Tensor]:
        """Mixture of what the last cohort has sent, by the client's coefficients; empty before the first round."""
        cohort = self.learned.as_state()["last"].tolist()
        average = RunningAverage()
        for share, other in zip(shares_of(self.coefficients([client], cohort))[0].tolist(), cohort, strict=True):
            average.update(self.sent.get(other), share)
        return average.result() if cohort else {}


def transfer_step(
    shares: Tensor, gram: Tensor, width: int, lr: float, rho: float, sharpness: float | None = 5.0
) -> Tensor:
    """Coefficients after one gradient step on MSE(p_i, sum_j c_ij p_j) + rho MSE(c_i, 1 / M), for each i.

    Args:
        shares: Coefficients c of a cohort, (M, M).
        gram: Inner products <p_i, p_j>, (M, M), which the gradient is linear in.
        width: Numbers in one p_i.
        lr: Length of the step.
        rho: Weight of the distance to equal coefficients.
        sharpness: The result is softmax(sharpness * c), row by row; ``None`` for c itself.

    Example:
        >>> import torch
        >>> from pfl_lightning.methods.ktpfl import transfer_step
        >>> transfer_step(torch.full((2, 2), 0.5), torch.eye(2), width=1, lr=0.5, rho=0.0, sharpness=None)
        tensor([[1., 0.],
                [0., 1.]])
    """
    count = len(shares)
    gradient = 2 / width * (shares @ gram - gram) + rho * 2 / count * (shares - 1 / count)
    stepped = shares - lr * gradient
    return stepped if sharpness is None else (sharpness * stepped).softmax(1)


def shares_of(rows: Tensor) -> Tensor:
    """Rows of coefficients (N, M) divided by their sums; equal ones where nothing positive is left."""
    rows = rows.clamp(min=0)
    totals = rows.sum(1, keepdim=True)
    return torch.where(totals > 0, rows / totals.clamp(min=torch.finfo(rows.dtype).tiny), 1 / max(rows.shape[1], 1))


def gram_of(contents: Sequence[State]) -> tuple[Tensor, int]:
    """Inner products of the clients' contents (M, M), tensor by tensor, and the numbers in a content."""
    gram, width = torch.zeros(len(contents), len(contents), dtype=torch.float64), 0
    for name in contents[0]:
        flat = torch.stack([content[name].flatten().double() for content in contents])
        gram, width = gram + flat @ flat.T, width + flat.shape[1]
    return gram, width
