"""FedAMP and HeurFedAMP: attentive message passing between clients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_between, check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.functional import RunningAverage, proximal_term
from pfl_lightning.messages import Broadcast, ClientUpdate, State
from pfl_lightning.methods._cohort import CohortAggregator
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.server import AggregationWeights
from pfl_lightning.state.client_states import ClientStates
from pfl_lightning.state.tensors import TensorDict, load_state, select_state


class FedAMP(FederatedClient):
    """Every client keeps its own model, drawn to a mixture in which similar clients' models count more.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        attention: What makes two clients similar: ``"cosine"`` of their models (HeurFedAMP), or ``"gaussian"``, by
            the distance of their models (FedAMP).
        sigma: Of ``"cosine"`` the factor inside the softmax, 0 or more; of ``"gaussian"`` the width, above 0.
        step: alpha of ``"gaussian"``, the factor of the other clients' weights; ``None`` is 1.
        own_share: Weight of a client's own model in its mixture, of ``"cosine"``; ``None`` takes 1 / cohort.
        proximal: lambda / alpha, the weight of half the squared distance to the mixture; 0 is local training, if fits
            begin with the own model.
        start: What a fit begins with: a client's ``"own"`` model, or its ``"mixture"``.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`. ``eval_model`` is ``"trained"``:
            clients are evaluated with their own models, and ``"aggregated"`` is refused.
    """

    citation = Citation("Personalized Cross-Silo Federated Learning on Non-IID Data", "Huang et al.", "AAAI", 2021)
    feature_based = True
    batch_norm = "own_statistics"
    shares_buffers = False
    eval_model = "trained"
    eval_models = ("trained",)  # clients never load what the server sends
    averages_samples = True
    loss_names = ("cross_entropy", "proximal")
    personalization_losses = ("cross_entropy",)

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        attention: str = "cosine",
        sigma: float = 1.0,
        step: float | None = None,
        own_share: float | None = None,
        proximal: float = 0.1,
        start: str = "own",
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_choice("attention", attention, ("cosine", "gaussian"))
        check_number("sigma", sigma, strict=attention == "gaussian")
        check_number("step (alpha)", step, optional=True)
        check_number("proximal (lambda / alpha)", proximal)
        check_choice("start", start, ("own", "mixture"))
        check_between("own_share", own_share, 0, 1, optional=True)
        if attention == "gaussian" and own_share is not None:
            raise ConfigurationError(
                "own_share is an option of attention='cosine'; with 'gaussian' a model keeps the weight that the "
                "others leave"
            )
        if attention == "cosine" and step is not None:
            raise ConfigurationError("step (alpha) is an option of attention='gaussian'; with 'cosine' leave it out")
        self.attention, self.sigma, self.own_share = attention, sigma, own_share
        self.step = 1.0 if step is None else step
        self.proximal, self.start = proximal, start
        self.mixture = TensorDict(persistent=False)  # u_k, for the time of a fit

    def receive(self, broadcast: Broadcast) -> None:
        """Keep u_k for the proximal term; the model is the client's own, or begins with u_k."""
        own = dict(self.named_parameters())
        # In the memory layout of the parameters, which steps are quicker with.
        mixture = {name: torch.empty_like(own[name]).copy_(u) for name, u in broadcast.weights.items()}
        self.mixture.assign(mixture)
        if self.start == "mixture":
            load_state(self, mixture)

    def loss_terms(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """F_k(w) + lambda / (2 alpha) ||w - u_k||^2."""
        terms = super().loss_terms(features, labels)
        if self.uses("proximal"):
            mixture = self.mixture.as_state()
            own = {name: p for name, p in self.named_parameters() if name in mixture}
            distance = proximal_term(own, {name: mixture[name] for name in own})
            terms["proximal"] = self.proximal / 2 * distance
        return terms


class FedAMPAggregator(CohortAggregator, of=FedAMP):
    """Mixes a model u_i = sum_j xi_ij w_j for each client of the cohort; the others keep theirs."""

    def __init__(self, client: FedAMP, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.attention, self.sigma, self.step = client.attention, client.sigma, client.step
        self.own_share = client.own_share
        self.mixtures = ClientStates(select_state(client, client.shared_names()), num_clients)

    def broadcast(self, client: int, round: int) -> Broadcast:
        """The client's own mixture; before its first round the model that all start from."""
        return Broadcast(client=client, round=round, weights=self.mixtures.get(client))

    def receive(self, update: ClientUpdate) -> None:
        """Keep the client's model until the round ends, on the host."""
        super().receive(update.to(torch.device("cpu")))

    def combine(self, cohort: list[ClientUpdate]) -> None:
        """The cohort's mixtures."""
        clients, models = tuple(update.client for update in cohort), [update.weights for update in cohort]
        weights = self._attention(models)
        self.aggregation_weights = AggregationWeights(clients, weights)
        for row, client in enumerate(clients):
            mixture = RunningAverage()
            for weight, model in zip(weights[row].tolist(), models, strict=True):
                mixture.update(model, weight)
            self.mixtures.set(client, mixture.result())  # u_i = sum_j xi_ij w_j

    def _attention(self, models: list[State]) -> Tensor:
        """xi, (m, m), in double precision; one tensor of the models after the other, as they may be large."""
        stacks = (torch.stack([model[name].double().flatten() for model in models]) for name in models[0])
        if self.attention == "cosine":
            products = torch.stack([stack @ stack.T for stack in stacks]).sum(dim=0)
            return cosine_attention(products, self.sigma, self.own_share)
        mode = "donot_use_mm_for_euclid_dist"  # which would lose small distances between large models
        squares = torch.stack([torch.cdist(s, s, compute_mode=mode).square() for s in stacks]).sum(dim=0)
        return gaussian_attention(squares, self.sigma, self.step)

    def has_client_weights(self) -> bool:
        """Each client gets its own mixture."""
        return True


def gaussian_attention(squares: Tensor, sigma: float, step: float) -> Tensor:
    """FedAMP: xi_ij = alpha / sigma exp(-||w_i - w_j||^2 / sigma) for j != i, and xi_ii what is left of 1.

    Where the others' weights add up to more than 1 they are scaled down to it, so that no weight is negative.

    Args:
        squares: ||w_i - w_j||^2, (m, m).
        sigma: Width, above 0.
        step: alpha.

    Returns:
        (m, m), rows that add up to 1.

    Example:
        >>> import torch
        >>> from pfl_lightning.methods.fedamp import gaussian_attention
        >>> squares = torch.tensor([[0.0, 0.0, 999.0], [0.0, 0.0, 999.0], [999.0, 999.0, 0.0]])
        >>> gaussian_attention(squares, sigma=1.0, step=0.25)
        tensor([[0.7500, 0.2500, 0.0000],
                [0.2500, 0.7500, 0.0000],
                [0.0000, 0.0000, 1.0000]])
    """
    others = (step / sigma * torch.exp(-squares / sigma)).fill_diagonal_(0)
    others = others / others.sum(dim=1, keepdim=True).clamp(min=1)
    return others + torch.diag((1 - others.sum(dim=1)).clamp(min=0))  # by rounding, it may be below 0


def cosine_attention(products: Tensor, sigma: float, own_share: float | None) -> Tensor:
    """HeurFedAMP: xi_ij = (1 - xi_ii) softmax over j != i of sigma cos(w_i, w_j), with a given xi_ii.

    Args:
        products: <w_i, w_j>, (m, m).
        sigma: Factor of the cosines; 0 gives all others the same weight.
        own_share: xi_ii; ``None`` is 1 / m. A single client has 1.

    Returns:
        (m, m), rows that add up to 1.

    Example:
        >>> import torch
        >>> from pfl_lightning.methods.fedamp import cosine_attention
        >>> cosine_attention(torch.eye(3), sigma=5.0, own_share=0.5)
        tensor([[0.5000, 0.2500, 0.2500],
                [0.2500, 0.5000, 0.2500],
                [0.2500, 0.2500, 0.5000]])
    """
    number = len(products)
    if number == 1:
        return products.new_ones(1, 1)
    own = 1 / number if own_share is None else own_share
    norms = products.diagonal().sqrt().clamp(min=1e-12)
    cosines = (sigma * products / (norms[:, None] * norms)).fill_diagonal_(-torch.inf)
    return (1 - own) * torch.softmax(cosines, dim=1) + own * torch.eye(number, dtype=products.dtype)
