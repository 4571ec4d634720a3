"""pFedHN: a hypernetwork on the server generates every client's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from pfl_lightning.checks import check_at_least, check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient
from pfl_lightning.errors import ConfigurationError
from pfl_lightning.learner import Learner
from pfl_lightning.messages import Broadcast, ClientUpdate, State
from pfl_lightning.methods._cohort import CohortAggregator
from pfl_lightning.options import OptionsWithoutSGD, Unpack

Weights = dict[str, Tensor]

REMEDY = "lower server_lr or the clients' lr, or clip the clients' gradients (gradient_clip_val of the engine)"


class PFedHN(FederatedClient):
    """A client trains what the server's hypernetwork generates for it; the change is the hypernetwork's gradient.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        personal_head: Whether the head stays on the client and the rest is generated (pFedHN-PC).
        server_lr: Learning rate of the hypernetwork and the embeddings; ``None`` takes that of the published code:
            0.01, or 0.05 with a personal head.
        server_momentum: Momentum of their SGD.
        server_weight_decay: Its weight decay.
        server_clip: Largest norm of their gradient; ``None`` does not clip.
        server_steps: ``"client"`` takes a step for each client of the cohort, in its order, towards its trained model
            from what the hypernetwork gives by then. ``"sent"`` does so from what it had given when the round began,
            ``"round"`` takes one step along the mean over the cohort.
        embedding_size: Width of a client's embedding; ``None`` takes 1 + m / 4, rounded down (m clients).
        hidden_size: Width of the hypernetwork's hidden layers.
        hidden_layers: Number of hidden layers after the first.
        lr: Learning rate of the clients.
        momentum: Momentum of the clients.
        weight_decay: Weight decay of the clients.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`. ``batch_norm`` may not be
            ``"shared"``: running statistics are not generated.
    """

    citation = Citation("Personalized Federated Learning using Hypernetworks", "Shamsian et al.", "ICML", 2021)
    feature_based = True
    batch_norm = "own"
    shares_buffers = False
    paper_batch_size = 64

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        personal_head: bool = False,
        server_lr: float | None = None,
        server_momentum: float = 0.9,
        server_weight_decay: float = 1e-3,
        server_clip: float | None = 50.0,
        server_steps: str = "client",
        embedding_size: int | None = None,
        hidden_size: int = 100,
        hidden_layers: int = 3,
        lr: float = 0.005,
        momentum: float = 0.9,
        weight_decay: float = 5e-5,
        **options: Unpack[OptionsWithoutSGD],
    ) -> None:
        super().__init__(encoder, num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay, **options)
        if options.get("batch_norm") == "shared":
            raise ConfigurationError(
                "batch_norm='shared' of PFedHN: the hypernetwork generates parameters and no running statistics; use "
                "'own' (batch normalization stays on the client) or 'own_statistics' (its weights are generated)"
            )
        for name, value in (("server_momentum", server_momentum), ("server_weight_decay", server_weight_decay)):
            check_number(name, value)
        for name, given in (("server_lr", server_lr), ("server_clip", server_clip)):
            check_number(name, given, strict=True, optional=True)
        check_choice("server_steps", server_steps, ("client", "sent", "round"))
        check_at_least("embedding_size", embedding_size, 1, optional=True)
        check_at_least("hidden_size", hidden_size, 1)
        check_at_least("hidden_layers", hidden_layers, 0)
        self.personal_head = personal_head
        self.server_lr = server_lr if server_lr is not None else 0.05 if personal_head else 0.01
        self.server_momentum, self.server_weight_decay = server_momentum, server_weight_decay
        self.server_clip, self.server_steps = server_clip, server_steps
        self.embedding_size, self.hidden_size, self.hidden_layers = embedding_size, hidden_size, hidden_layers
        self.shared = ("encoder.*",) if personal_head else ("encoder.*", "head.*")

    def remedies(self) -> tuple[str, ...]:
        """The server's rate: a rate that suits a mean of models is far too large for a hypernetwork."""
        return (f"a smaller server_lr (now {self.server_lr:g})",)


class Hypernetwork(nn.Module):
    """h(v; phi): from a client's embedding v to the parameters of its model.

    Linear layers with ReLU between them, and for every tensor of the model a linear layer to its numbers.

    Args:
        num_clients: Number of embeddings, m.
        embedding_size: Width of an embedding.
        hidden_size: Width of the hidden layers.
        hidden_layers: Number of hidden layers after the first.
        shapes: Shapes of the model's parameters, by name.
    """

    def __init__(
        self,
        num_clients: int,
        embedding_size: int,
        hidden_size: int,
        hidden_layers: int,
        shapes: Mapping[str, torch.Size],
    ) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        self.embeddings = nn.Embedding(num_clients, embedding_size)
        layers: list[nn.Module] = [nn.Linear(embedding_size, hidden_size)]
        for _ in range(hidden_layers):
            layers += [nn.ReLU(), nn.Linear(hidden_size, hidden_size)]
        self.body = nn.Sequential(*layers)
        own = {name.replace(".", "/"): nn.Linear(hidden_size, shape.numel()) for name, shape in self.shapes.items()}
        self.outputs = nn.ModuleDict(own)  # a module's name must not have a dot

    @staticmethod
    def size(num_clients: int, embedding_size: int, hidden_size: int, hidden_layers: int, generated: int) -> int:
        """Number of parameters of a hypernetwork that generates ``generated`` numbers, without building it."""
        first = (embedding_size + 1) * hidden_size + num_clients * embedding_size
        return first + hidden_layers * (hidden_size + 1) * hidden_size + (hidden_size + 1) * generated

    def forward(self, embedding: Tensor) -> Weights:
        """Parameters by name, of one embedding (e,)."""
        hidden = self.body(embedding)
        return {name: self.outputs[name.replace(".", "/")](hidden).view(shape) for name, shape in self.shapes.items()}


class PFedHNAggregator(CohortAggregator, of=PFedHN):
    """Generates every client's parameters, and trains what generates them.

    What clients were sent is the same through a round, as phi and the embeddings change in :meth:`combine`. Novel
    clients are sent what the mean embedding of the participating ones gives.
    """

    def __init__(self, client: PFedHN, num_clients: int) -> None:
        super().__init__(client, num_clients)
        theta = {name: tensor for name, tensor in client.state_dict().items() if name in self.expected_weights}
        self.steps, generated = client.server_steps, sum(t.numel() for t in theta.values())
        width = client.embedding_size or 1 + num_clients // 4
        sizes = (num_clients, width, client.hidden_size, client.hidden_layers)
        size = Hypernetwork.size(*sizes, generated)
        rank_zero_info(  # itself, gradient, momentum, and the copies by which steps and rounds are undone
            f"The hypernetwork that generates {generated:,} numbers has {size:,} parameters and needs "
            f"{20 * size / 1e9:,.3f} GB of memory to train; personal_head=True, a smaller encoder or a smaller "
            "hidden_size need less"
        )
        sgd = partial(
            torch.optim.SGD,
            lr=client.server_lr,
            momentum=client.server_momentum,
            weight_decay=client.server_weight_decay,
            fused=True,  # the same numbers in one pass over a network that is many times as large as a model
        )
        network = Hypernetwork(*sizes, {name: tensor.shape for name, tensor in theta.items()})
        self.learner = Learner(network, sgd, client.server_clip)
        self._types = {name: tensor.dtype for name, tensor in theta.items()}

    def _embedding(self, client: int) -> Tensor:
        """v_k; of a novel client the mean over those that take part."""
        embeddings: Tensor = cast(Hypernetwork, self.learner.network).embeddings.weight
        if client not in self.facts.novel:
            return embeddings[client]
        known = [one for one in range(self.num_clients) if one not in self.facts.novel]
        return embeddings[known].mean(dim=0)

    def broadcast(self, client: int, round: int) -> Broadcast:
        """theta_k = h(v_k; phi), the client's own."""
        with self.learner.evaluating():
            theta = self.learner.network(self._embedding(client))
        weights = {name: tensor.to(self._types[name]) for name, tensor in theta.items()}
        return Broadcast(client=client, round=round, weights=weights)

    def receive(self, update: ClientUpdate) -> None:
        """Keep the client's model theta~_k, or how far the client went, theta_k - theta~_k."""
        like = self._embedding(update.client)
        kept = update.with_tensors(lambda tensor: tensor.to(like))
        if self.steps != "client":
            sent = self.broadcast(update.client, update.round).weights
            kept = replace(kept, weights={name: sent[name].to(like) - tensor for name, tensor in kept.weights.items()})
        super().receive(kept)

    def combine(self, cohort: list[ClientUpdate]) -> None:
        """Steps of phi and v along J^T (theta_k - theta~_k)."""
        parts = [partial(self._objective, update.client, update.weights) for update in cohort]
        steps = [lambda: torch.stack([part() for part in parts]).mean()] if self.steps == "round" else parts
        self.learner.learn(steps, cohort[0].round, REMEDY)

    def _objective(self, client: int, kept: State) -> Tensor:
        """What has that gradient: |theta_k - theta~_k|^2 / 2 or, with the change as sent, <theta_k, change>."""
        theta = self.learner.network(self._embedding(client))
        if self.steps == "client":
            return torch.stack([(theta[name] - kept[name]).square().sum() for name in kept]).sum() / 2
        return torch.stack([(theta[name] * kept[name]).sum() for name in kept]).sum()
