"""Partition rules that draw proportions from a Dirichlet distribution, without retries."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from pfl_lightning.checks import check_at_least, check_number
from pfl_lightning.datamodules.counting import Floats, Ints, Labels, distribute, fill, round_rows, spread_offsets
from pfl_lightning.datamodules.partition.base import Partitioner, check_labels, check_sizes, check_total, checked_sizes
from pfl_lightning.seeding import DataStream


class DirichletOverClients(Partitioner):
    """Proportions over the clients from Dir(alpha) for each class (FedPAC, appendix C.8).

    All samples are assigned, in sizes that differ widely. Clients that end up below ``min_samples`` take samples from
    the currently largest client, of the class that their own draw favors most among the classes it holds. No draw is
    ever repeated.

    Args:
        num_clients: Number of clients m.
        alpha: Concentration of the symmetric Dirichlet distribution, above 0; the smaller, the fewer clients share a
            class.
        samples_per_client: Size of each client, or one size per client, in the class proportions of its draw as long as
            the classes last. None for the sizes that result from the draw.
        min_samples: Least size of a client if the sizes result from the draw.
        seed: Seed of the random choice.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import numpy as np
        >>> from pfl_lightning.datamodules import DirichletOverClients, class_counts
        >>> labels = np.repeat([0, 1, 2], 40)
        >>> rule = DirichletOverClients(num_clients=4, alpha=0.3, min_samples=10)
        >>> class_counts(labels, rule.partition(labels), num_classes=3)
        array([[10,  3,  1],
               [ 0, 15,  0],
               [23,  6, 22],
               [ 7, 16, 17]])
    """

    def __init__(
        self,
        num_clients: int,
        alpha: float = 0.5,
        samples_per_client: int | list[int] | None = None,
        min_samples: int = 10,
        seed: int = 0,
    ) -> None:
        super().__init__(num_clients, seed)
        check_at_least("min_samples", min_samples, 1)  # a client cannot be empty
        check_number("alpha", alpha, strict=True)
        self.alpha = float(alpha)
        self.samples_per_client = checked_sizes(samples_per_client, self.num_clients)
        self.min_samples = min_samples

    def partition(self, labels: Labels) -> Sequence[Ints]:
        """Indices of each client's training samples, see :meth:`Partitioner.partition`."""
        array = check_labels(labels)
        rng = self.rng(DataStream.RULE)
        supply = np.bincount(array).astype(np.int64)
        shares = rng.dirichlet(np.full(self.num_clients, self.alpha), size=len(supply))  # (C, m)
        if self.samples_per_client is not None:
            sizes = check_sizes(self.samples_per_client, self.num_clients)
            check_total(sizes, len(array))
            return distribute(array, fill(shares.T * supply, sizes, supply, rng), rng)
        counts = round_rows(shares * supply[:, None], spread_offsets(len(supply), rng.random())).T
        return distribute(array, self._raise_to_minimum(counts.copy(), shares.T), rng)

    def _raise_to_minimum(self, counts: Ints, shares: Floats) -> Ints:
        check_total(np.full(self.num_clients, self.min_samples), int(counts.sum()), "min_samples")
        sizes = counts.sum(axis=1)
        large = np.flatnonzero(sizes > self.min_samples)
        donors = list(zip((-sizes[large]).tolist(), large.tolist(), strict=True))
        heapq.heapify(donors)  # the largest first
        for client in np.flatnonzero(sizes < self.min_samples).tolist():
            missing = self.min_samples - int(sizes[client])
            # Every pass fills the client, exhausts one class of a donor or brings a donor down to the minimum.
            while missing > 0:
                size, donor = donors[0]
                favored = int(np.where(counts[donor] > 0, shares[client], -1.0).argmax())
                moved = min(missing, int(counts[donor, favored]), -size - self.min_samples)
                counts[donor, favored] -= moved
                counts[client, favored] += moved
                missing -= moved
                heapq.heapreplace(donors, (size + moved, donor))
        return counts


class DirichletOverClasses(Partitioner):
    """Class proportions from Dir(alpha) for each client, with clients of equal size (FedClassAvg, Calibre: D-non-iid).

    A class that runs out is replaced by the client's other classes, in the proportions of its draw. A client whose
    classes have all run out takes the samples that are left. Sizes are always exact.

    Args:
        num_clients: Number of clients m.
        alpha: Concentration of the symmetric Dirichlet distribution, above 0; the smaller, the fewer classes a client
            holds.
        samples_per_client: Size of each client, or one size per client; None for the greatest equal size, N // m.
        seed: Seed of the random choice.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import numpy as np
        >>> from pfl_lightning.datamodules import DirichletOverClasses, class_counts
        >>> labels = np.repeat([0, 1, 2], 40)
        >>> rule = DirichletOverClasses(num_clients=4, alpha=0.3)
        >>> class_counts(labels, rule.partition(labels), num_classes=3)  # every client has 30 samples
        array([[15,  0, 15],
               [11,  4, 15],
               [ 9, 20,  1],
               [ 5, 16,  9]])
    """

    def __init__(
        self, num_clients: int, alpha: float = 0.5, samples_per_client: int | list[int] | None = None, seed: int = 0
    ) -> None:
        super().__init__(num_clients, seed)
        check_number("alpha", alpha, strict=True)
        self.alpha = float(alpha)
        self.samples_per_client = checked_sizes(samples_per_client, self.num_clients)

    def partition(self, labels: Labels) -> Sequence[Ints]:
        """Indices of each client's training samples, see :meth:`Partitioner.partition`."""
        array = check_labels(labels)
        rng = self.rng(DataStream.RULE)
        supply = np.bincount(array).astype(np.int64)
        asked = self.samples_per_client
        sizes = check_sizes(max(len(array) // self.num_clients, 1) if asked is None else asked, self.num_clients)
        check_total(sizes, len(array))
        shares = rng.dirichlet(np.full(len(supply), self.alpha), size=self.num_clients)  # (m, C)
        return distribute(array, fill(shares, sizes, supply, rng), rng)
