"""CFL: clusters of clients, split where the clients' updates point apart although their mean has all but vanished."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pfl_lightning.checks import check_at_least, check_between, check_choice, check_number
from pfl_lightning.client import Citation, FederatedClient
from pfl_lightning.functional import weighted_average
from pfl_lightning.messages import Broadcast, ClientUpdate, State
from pfl_lightning.methods._bank import row_of, stacked, weights_in_clusters
from pfl_lightning.methods._cohort import CohortAggregator
from pfl_lightning.options import ClientOptions, Unpack
from pfl_lightning.state.client_states import ClientStates
from pfl_lightning.state.tensors import TensorDict, select_state


class CFL(FederatedClient):
    """FedAvg within clusters of clients; the server splits a cluster where its clients have stopped agreeing.

    All clients begin as one cluster. A cluster is split in two where the mean of its clients' updates is short, so that
    their common model is trained, and one of the updates is long, so that its client would go on (Algorithm 3).

    Args:
        encoder: See :class:`~pfl_lightning.client.FederatedClient`.
        num_classes: Number of classes, C.
        eps_1: Norm that the mean update of a cluster must fall below.
        eps_2: Norm that the longest update of a cluster must exceed.
        gamma_max: Bound on how far an update may be from the one that all samples of its cluster would give; a split
            must separate clients further than that. 0 allows every split (published code).
        first_split: Number of the first round, from 0, in which clusters may be split.
        linkage: How a cluster is split. ``"single"`` makes the largest cosine similarity between the parts as small as
            can be (Algorithm 1), ``"complete"`` merges by the smallest one (published code).
        by_samples: Whether clients of a cluster count by their numbers of samples; otherwise all count the same
            (published code).
        options: Further arguments of :class:`~pfl_lightning.client.FederatedClient`.
    """

    citation = Citation(
        "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy Constraints",
        "Sattler et al.",
        "TNNLS",
        2021,
    )
    model_agnostic = True
    batch_norm = "shared"

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        *,
        eps_1: float = 0.4,
        eps_2: float = 1.6,
        gamma_max: float = 0.0,
        first_split: int = 20,
        linkage: str = "single",
        by_samples: bool = True,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(encoder, num_classes, **options)
        check_number("eps_1", eps_1)
        check_number("eps_2", eps_2)
        check_between("gamma_max", gamma_max, 0, 1)
        check_at_least("first_split", first_split, 0)
        check_choice("linkage", linkage, ("single", "complete"))
        self.eps_1, self.eps_2, self.gamma_max = eps_1, eps_2, gamma_max
        self.first_split, self.linkage, self.by_samples = first_split, linkage, by_samples


class CFLAggregator(CohortAggregator, of=CFL):
    """A tree of models: its leaves are the clusters, and a node that was split keeps the model that it had then.

    A client that was not in the cohort when its cluster was split gets the model from before the split, until an update
    of its own tells to which part it belongs. The root serves novel clients.

    Every round logs ``clusters``, their number, and ``cluster/j/mean`` and ``cluster/j/longest``, the norms of cluster
    j that are compared with ``eps_1`` and ``eps_2``.
    """

    def __init__(self, client: CFL, num_clients: int) -> None:
        super().__init__(client, num_clients)
        self.eps_1, self.eps_2, self.gamma_max = client.eps_1, client.eps_2, client.gamma_max
        self.first_split, self.linkage, self.by_samples = client.first_split, client.linkage, client.by_samples
        shared, trained = client.shared_names(), dict(client.named_parameters(remove_duplicate=False))
        self.parameter_names = [name for name in shared if name in trained]
        first = stacked([select_state(client, shared)])
        self.models = TensorDict(first)  # of the nodes, (nodes, ...) by name
        self.births = TensorDict(first)  # those that they began with: what the clients of a part went towards
        self.tree = TensorDict({"parts": torch.zeros(1, dtype=torch.int64)})  # first of a node's two parts; 0 in leaves
        self.places = ClientStates({"node": torch.zeros((), dtype=torch.int64)}, num_clients)

    def broadcast(self, client: int, round: int) -> Broadcast:
        """The model of the client's node."""
        weights = row_of(self.models.as_state(), self._node(client))
        return Broadcast(client=client, round=round, weights=weights)

    def combine(self, cohort: list[ClientUpdate]) -> None:
        """Average every cluster, after a split where one is due, and see where late clients belong."""
        self.metrics = {}
        groups: dict[int, list[ClientUpdate]] = {}
        for update in cohort:
            groups.setdefault(self._node(update.client), []).append(update)
        averaged = list[ClientUpdate]()
        for node, updates in groups.items():
            part = int(self.tree.as_state()["parts"][node])
            if part:
                births = [row_of(self.births.as_state(), own) for own in (part, part + 1)]
                similar = cosines(self._products(node, [*births, *(u.weights for u in updates)]))[2:]
                self._place(updates, part + (similar[:, 1] > similar[:, 0]).long())
            else:
                self._average(node, updates)
                averaged += updates
        self.metrics["clusters"] = float((self.tree.as_state()["parts"] == 0).sum())
        if averaged:
            chosen = [(u.client, self._node(u.client), self._weight(u)) for u in averaged]
            self.aggregation_weights = weights_in_clusters(chosen)

    def _node(self, client: int) -> int:
        return int(self.places.get(client)["node"])

    def _weight(self, update: ClientUpdate) -> float:
        return float(update.num_samples if self.by_samples else 1)

    def _place(self, updates: Sequence[ClientUpdate], nodes: Tensor) -> None:
        for update, node in zip(updates, nodes, strict=True):
            self.places.set(update.client, {"node": node})

    def _products(self, node: int, states: Sequence[State]) -> Tensor:
        """Inner products of states, as changes of the node's model, (j, j), in double precision; no buffers count."""
        before, products = row_of(self.models.as_state(), node), torch.zeros(len(states), len(states)).double()
        for name in self.parameter_names:  # one tensor after the other, as models may be large
            changes = torch.stack(
                [state[name].cpu().double() - before[name].cpu().double() for state in states]
            ).flatten(1)
            products += changes @ changes.T
        return products

    def _average(self, node: int, updates: Sequence[ClientUpdate]) -> None:
        """The mean model of a cluster, or those of its two parts."""
        products = self._products(node, [update.weights for update in updates])
        weights = torch.tensor([self._weight(update) for update in updates]).double()
        share = weights / weights.sum()
        mean, longest = float((share @ products @ share).clamp(min=0).sqrt()), float(products.diagonal().max().sqrt())
        self.metrics |= {f"cluster/{node}/mean": mean, f"cluster/{node}/longest": longest}
        parts = [torch.ones(len(updates), dtype=torch.bool)]
        due = mean < self.eps_1 and longest > self.eps_2 and updates[0].round >= self.first_split
        if due and len(updates) > 2:
            alpha = cosines(products)
            first = bipartition(alpha, self.linkage)
            if ((1 - alpha[first][:, ~first].max()) / 2).clamp(min=0).sqrt() > self.gamma_max:
                parts = [first, ~first]
        means = stacked([weighted_average([u.weights for u in updates], weights * part) for part in parts])
        models, births, tree = self.models.as_state(), self.births.as_state(), self.tree.as_state()["parts"].clone()
        if len(parts) == 1:
            place = torch.tensor([node], device=tree.device)
            self.models.assign({name: rows.index_copy(0, place, means[name]) for name, rows in models.items()})
            return
        self._place(updates, len(tree) + (~first).long())
        tree[node] = len(tree)
        self.tree.assign({"parts": torch.cat([tree, tree.new_zeros(2)])})
        self.models.assign({name: torch.cat([rows, means[name]]) for name, rows in models.items()})
        self.births.assign({name: torch.cat([rows, means[name]]) for name, rows in births.items()})

    def has_client_weights(self) -> bool:
        """Return True: each client gets the mean of its cluster."""
        return True


def cosines(products: Tensor) -> Tensor:
    """Cosine similarities alpha, (j, j), of vectors with these inner products; 0 beside a vector of length 0."""
    norms = products.diagonal().sqrt().clamp(min=1e-12)
    return products / (norms[:, None] * norms)


def bipartition(similarities: Tensor, linkage: str) -> Tensor:
    """Split clients in two by agglomerative clustering.

    Args:
        similarities: alpha, (j, j), of at least two clients.
        linkage: ``"single"`` finds the parts whose largest similarity between them is least (Algorithm 1);
            ``"complete"`` merges by the least similarity.

    Returns:
        Whether a client belongs to the part of the first client, (j,).

    Example:
        >>> import torch
        >>> from pfl_lightning.methods.cfl import bipartition
        >>> bipartition(torch.tensor([[1.0, -0.5, 0.9], [-0.5, 1.0, -0.4], [0.9, -0.4, 1.0]]), "single")
        tensor([ True, False,  True])
    """
    from sklearn.cluster import AgglomerativeClustering

    clustering = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage=linkage)
    labels = torch.from_numpy(clustering.fit_predict((1 - similarities).clamp(min=0).numpy()))
    return labels == labels[0]
