"""HypCluster and IFCA: several global models, each client trains the one that serves it best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_at_least, check_choice
from pfl_lightning.client import Citation, FederatedClient, FitContext
from pfl_lightning.errors import CheckpointError, ConfigurationError
from pfl_lightning.functional import RunningAverage
from pfl_lightning.messages import LARGEST, ClientUpdate, State, statistics_field
from pfl_lightning.methods._bank import BankBroadcast, mean_loss, row_of, stacked, weights_in_clusters
from pfl_lightning.methods._starts import further_starts
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.seeding import Purpose, seeded_generator
from pfl_lightning.server import Aggregator
from pfl_lightning.state.tensors import TensorDict, load_state, select_state


@dataclass(frozen=True, kw_only=True)
class HypClusterUpdate(ClientUpdate):
    """The trained model and its cluster.

    Attributes:
        cluster: Number of the cluster, a scalar; in a round of the k-means++ start, of the one that is looked for.
        served: Least mean loss of the models that were found so far, a scalar; in the rounds of the k-means++ start.
    """

    cluster: Tensor = statistics_field(shape="", dtype=torch.int64, at_least=0, below="k", tells="choice")
    served: Tensor | None = statistics_field(
        shape="", floating=True, default=None, when="starting", tells="quality of fit"
    )


@dataclass(frozen=True)
class Choice:
    """What a client has found before its fit.

    Attributes:
        cluster: The cluster that it has chosen; in the k-means++ start, the one that is looked for.
        served: Least mean loss under the models found so far, in the k-means++ start; otherwise ``None``.
    """

    cluster: int
    served: float | None = None


class HypCluster(FederatedClient):
    """k global models; a client takes the one of least loss on its own training samples, and trains it.

    The server averages each model over the clients that have chosen it. Clients choose again in every round, and before
    every evaluation, novel clients too. With ``by_samples=False`` and ``clustered=("head.*",)`` it is IFCA with weight
    sharing.

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        clusters: Number of global models, k.
        by_samples: Whether clients of a cluster count by their numbers of samples (HypCluster); otherwise all count
            the same (IFCA).
        clustered: Patterns of the parameters and buffers that the clusters have each of their own; the rest is one for
            all.
        start: How the models begin. ``"draws"``: with first weights of their own. ``"kmeans++"`` (fedjax): the first k
            rounds find them. In each, the clients train the first weights; the server takes the model of a client
            drawn at random, and then, round by round, of the client that the models found so far serve worst.
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "Three Approaches for Personalization with Applications to Federated Learning", "Mansour et al.", "arXiv", 2020
    )
    batch_norm = "shared"
    eval_models = ("aggregated",)  # what a client chooses among the server's models

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        clusters: int = 3,
        by_samples: bool = True,
        clustered: Sequence[str] = ("encoder.*", "head.*"),
        start: str = "draws",
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_at_least("clusters (k)", clusters, 1)
        check_choice("start", start, ("draws", "kmeans++"))
        self.clusters, self.by_samples, self.clustered, self.start = clusters, by_samples, tuple(clustered), start
        self.start_seed = int(torch.randint(2**62, ()))  # after the first weights: clusters begin by the run's seed
        self.further_encoders = clusters - 1 if start == "draws" else 0
        self.made: Sequence[nn.Module] = ()  # the further clusters' first encoders, until the server has them
        self.members: Tensor
        self.register_buffer("members", torch.zeros(0, dtype=torch.int64), persistent=False)
        self.bank = TensorDict(persistent=False)  # the received models, until one is chosen

    def take_encoders(self, encoders: Sequence[nn.Module]) -> None:
        """Hold the further clusters' encoders until the server is made."""
        object.__setattr__(self, "made", tuple(encoders))  # they are no part of the client

    def configure_aggregator(self, num_clients: int) -> HypClusterAggregator:
        """The server of HypCluster."""
        if self.start == "kmeans++" and self.clusters > num_clients:
            raise ConfigurationError(
                f"start='kmeans++' begins each cluster at another client's model, and there are {num_clients} clients "
                f"for {self.clusters} clusters: set clusters to at most {num_clients}, or start='draws'"
            )
        server = HypClusterAggregator(self, num_clients)
        self.take_encoders(())
        return server

    def receive(self, broadcast: BankBroadcast) -> None:
        """Take over what all clusters share, and hold their models."""
        super().receive(broadcast)
        self.bank.assign(broadcast.bank)
        self.members = broadcast.members

    def choose(self, context: FitContext) -> Choice:
        """Load the model of least mean loss on the own training samples, the first one of ties.

        In the k-means++ start these are the models found so far, or, while there are none, the first weights.
        """
        bank, found = self.bank.as_state(), self._found()
        losses = self._losses(context, len(self.members) if found is None else found)
        chosen = losses.index(min(losses)) if losses else 0
        load_state(self, row_of(bank, chosen))
        return Choice(chosen) if found is None else Choice(found, min(losses, default=0.0))

    def _found(self) -> int | None:
        """Number of models that the k-means++ start has found so far; ``None`` after it."""
        starting = bool(self.members[-1] == self.clusters)  # the first weights are sent behind the models
        return len(self.members) - 1 if starting else None

    def _losses(self, context: FitContext, rows: int) -> list[float]:
        """Mean losses of the first models of the bank on the own training samples; none where there is no choice."""
        bank, losses = self.bank.as_state(), list[float]()
        for row in range(rows if self.clusters > 1 else 0):
            load_state(self, row_of(bank, row))
            loss = mean_loss(self, context.data)
            losses.append(math.inf if math.isnan(loss) else loss)
        return losses

    def before_fit(self, context: FitContext) -> Choice:
        """Choose the cluster to train with; in the k-means++ start continue from the first weights."""
        choice = self.choose(context)
        if choice.served is not None:
            load_state(self, row_of(self.bank.as_state(), -1))
        self._forget()
        return choice

    def before_evaluation(self, context: FitContext) -> None:
        """Choose among the models that the server would send now."""
        self.choose(context)
        self._forget()

    def _forget(self) -> None:
        self.bank.assign({})
        self.members = self.members[:0]

    def make_update(self, context: FitContext, before: Choice) -> HypClusterUpdate:
        """The trained model and its cluster, and in the k-means++ start how well the client was served."""
        update = super().make_update(context, before)
        # A client whose loss is infinite under all models found so far is served worst, and must not be left out.
        served = None if before.served is None else torch.tensor(min(before.served, LARGEST))
        return HypClusterUpdate(**vars(update), cluster=torch.tensor(before.cluster), served=served)


class HypClusterAggregator(Aggregator):
    """Averages the models of each cluster over the clients that chose it; a model that nobody chose stays as it is.

    Every round logs ``cluster/j``, the number of clients that have chosen cluster j; one of the k-means++ start logs
    ``cluster/found``.
    """

    update_class = HypClusterUpdate

    def __init__(self, client: HypCluster, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.by_samples, self.clusters = client.by_samples, client.clusters
        self.sizes["k"] = client.clusters
        shared = select_state(client, client.shared_names())
        names = [name for name in client.match(client.state_dict(), client.clustered) if name in shared]
        self.weights = TensorDict({name: value for name, value in shared.items() if name not in names})
        self.found: Tensor
        self.register_buffer("found", torch.tensor(client.clusters if client.start == "draws" else 0))
        if self.starting and len(self.weights):
            raise ConfigurationError(
                "start='kmeans++' compares whole models, but with `clustered` all clusters share some parts: leave "
                "`clustered` out, or use start='draws'"
            )
        starts: list[State] = [select_state(client, names)] * client.clusters  # a model that is not found yet
        if not self.starting:
            starts = further_starts(client, names, "cluster", client.clusters, client.start_seed, client.made)
        self.bank = TensorDict(stacked(starts))
        self._start_round()

    @property
    def starting(self) -> bool:
        """Whether the k-means++ start still looks for models."""
        return int(self.found) < self.clusters

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        own = self.clusters
        saved = next((len(value) for key, value in state_dict.items() if key.startswith(f"{prefix}bank.")), own)
        if saved != own:
            raise CheckpointError(f"the checkpoint has {saved} clusters, this run {own}: set clusters={saved}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _start_round(self) -> None:
        self._rest = RunningAverage()
        self._averages = [RunningAverage() for _ in range(self.clusters)]
        self._chosen: list[tuple[int, int, float]] = []  # client, cluster, weight
        self._candidate: tuple[float, State] | None = None  # of the k-means++ start: the worst served so far

    def broadcast(self, client: int, round: int) -> BankBroadcast:
        """All models, the same for every client; in the k-means++ start those found so far, and the first weights."""
        members, bank = torch.arange(self.clusters), self.bank.as_state()
        if self.starting:
            members = torch.tensor([*range(int(self.found)), self.clusters])
            rows = torch.tensor([*range(int(self.found)), self.clusters - 1])
            bank = {name: tensor[rows.to(tensor.device)] for name, tensor in bank.items()}
        weights = self.weights.as_state()
        return BankBroadcast(client=client, round=round, weights=weights, bank=bank, members=members)

    def receive(self, update: HypClusterUpdate) -> None:
        """Add a client's model to the average of its cluster, and to that of all what clusters share."""
        if update.served is not None:
            self._compare(update, float(update.served))
            return
        cluster, weight = int(update.cluster), float(update.num_samples if self.by_samples else 1)
        own = {name: update.weights[name] for name in self.bank.as_state()}
        self._averages[cluster].update(own, weight)
        if len(self.weights):
            self._rest.update({name: update.weights[name] for name in self.weights.as_state()}, weight)
        self._chosen.append((update.client, cluster, weight))

    def _compare(self, update: HypClusterUpdate, served: float) -> None:
        """Keep the model of the client that is served worst, the first one of ties; at first, of a random one."""
        if int(self.found) == 0:  # each with the same probability, however many there will be
            draws = seeded_generator(self.seed, Purpose.FIRST_CLUSTER, update.round, update.client)
            served = float(torch.rand((), generator=draws))
        if self._candidate is None or served > self._candidate[0]:
            self._candidate = (served, update.weights)

    def _take_candidate(self) -> None:
        """Take over the model that was found in a round of the k-means++ start."""
        candidate, place = self._candidate, int(self.found)
        self._start_round()
        if candidate is None:
            return
        bank = self.bank.as_state()
        rows = [candidate[1] if row == place else row_of(bank, row) for row in range(self.clusters)]
        self.bank.assign(stacked(rows))
        self.found = self.found + 1
        self.metrics = {"cluster/found": float(place + 1)}

    def aggregate(self) -> None:
        """The mean of every cluster that was chosen, and that of what all share."""
        if self.starting:
            self._take_candidate()
            return
        bank, rest, averages, chosen = self.bank.as_state(), self._rest, self._averages, self._chosen
        self._start_round()
        if not chosen:
            return
        rows = [average.result() if average.total_weight > 0 else row_of(bank, j) for j, average in enumerate(averages)]
        self.bank.assign(stacked(rows))
        if rest.total_weight > 0:
            self.weights.assign(rest.result())
        self.metrics = {f"cluster/{j}": float(sum(c == j for _, c, _ in chosen)) for j in range(self.clusters)}
        self.aggregation_weights = weights_in_clusters(chosen)

    def has_client_weights(self) -> bool:
        """Return True: each client gets the mean of its cluster."""
        return True
