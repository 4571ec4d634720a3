"""Partition by domain: each client has samples of one domain, such as photos or sketches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from numbers import Integral

import numpy as np

from pfl_lightning.checks import check_between
from pfl_lightning.datamodules.counting import Ints, Labels, Parts
from pfl_lightning.datamodules.partition.base import Partitioner, PartitionError, check_sizes, checked_sizes
from pfl_lightning.seeding import DataStream


class Domains(Partitioner):
    """Clients by domain: one client per domain, or the same number of clients per domain (DualFed, section 5.1).

    Clients are in the order of the domains: of m clients on D domains, client k has domain ``k * D // m``. Each draws
    its training samples at random from its domain. The samples of a domain that none of its clients draws are test
    samples. The clients of the domain share them: each is tested on all of them, or on its own random choice of
    ``test_samples_per_client``. ``validation_share`` is taken off the training samples; ``test_share`` is not used.

    DualFed has 500 training images per client on PACS and DomainNet. On Office-Home it has 2,000, but 1,942 in the
    domain Art: 80 % of Art's 2,427 images, which is what ``samples_per_client: 2000`` gives here.

    Args:
        num_clients: Number of clients m: the number of domains, or a multiple of it.
        samples_per_client: Training samples of each client. A client whose domain is too small gets ``max_share`` of it
            (divided among its clients), with a warning. A list gives every client its own size, exactly. None for
            ``max_share`` of every domain.
        max_share: Greatest share of a domain's samples that its clients may train on, between 0 and 1, so that test
            samples remain. A list of sizes only has to leave one test sample.
        seed: Seed of the random choice.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import numpy as np
        >>> from pfl_lightning.datamodules import Domains
        >>> domains = np.repeat([0, 1], 10)  # ten photos, ten sketches
        >>> rule = Domains(num_clients=2, samples_per_client=6).with_domains(domains, ["photo", "sketch"])
        >>> train = rule.partition(np.zeros(20, dtype=int))
        >>> [(len(indices), set(domains[indices].tolist())) for indices in train]
        [(6, {0}), (6, {1})]
    """

    def __init__(
        self, num_clients: int, samples_per_client: int | list[int] | None = None, max_share: float = 0.8, seed: int = 0
    ) -> None:
        super().__init__(num_clients, seed)
        check_between("max_share", max_share, 0, 1)
        self.samples_per_client = checked_sizes(samples_per_client, self.num_clients)
        self.max_share = max_share
        self._names: tuple[str, ...] = ()
        self._pools: list[Ints] = []

    def with_domains(self, domains: Ints, names: Sequence[str]) -> Domains:
        """Copy of this rule for the domains of a data set, see :meth:`Partitioner.with_domains`.

        Raises:
            PartitionError: If the number of clients is not a multiple of the number of domains, or a domain is empty.
        """
        if self.num_clients % len(names):
            raise PartitionError(
                f"Domains: num_clients is {self.num_clients}, the data have {len(names)} domains "
                f"({', '.join(names)}): set num_clients to {len(names)} or a multiple of it, or choose other domains"
            )
        other = copy.copy(self)
        other._names = tuple(names)
        other.fixed_test = other.fixed_train = True  # it lists them, in the data set's own order
        other._pools = [np.flatnonzero(domains == number).astype(np.int64) for number in range(len(names))]
        return other

    def partition(self, labels: Labels) -> Sequence[Ints]:
        """Indices of each client's training samples, see :meth:`Partitioner.partition`."""
        sizes, wanted, each = self._sizes(), self.samples_per_client, self.num_clients // len(self._pools)
        if isinstance(wanted, Integral) and (sizes < wanted).any():
            short = {self._names[client // each]: int(sizes[client]) for client in np.flatnonzero(sizes < wanted)}
            warnings.warn(
                f"Domains: clients get fewer than {wanted} training samples, as their domain has no more (max_share "
                f"{self.max_share}): {', '.join(f'{size} in {name!r}' for name, size in short.items())}",
                stacklevel=2,
            )
        return self._draw(sizes)[0]

    def partition_test(
        self, test_labels: Labels, train_labels_per_client: Sequence[Labels], samples_per_client: int | None = None
    ) -> Sequence[Ints]:
        """Indices of the samples of each client's domain that no client trains on.

        Args:
            test_labels: Class of every sample of the data set, shape (N,).
            train_labels_per_client: Not used.
            samples_per_client: Greatest size of a client's test split; None for all of these samples.

        Returns:
            One sorted index array per client; clients of one domain share samples.
        """
        rests = self._draw(self._sizes())[1]
        parts = []
        for client in range(self.num_clients):
            rest = rests[client * len(rests) // self.num_clients]
            if samples_per_client is not None and samples_per_client < len(rest):
                rest = np.sort(self.rng(DataStream.TEST, client).choice(rest, samples_per_client, replace=False))
            parts.append(rest)
        return parts

    def _draw(self, sizes: Ints) -> tuple[list[Ints], list[Ints]]:
        """Training samples of each client, and the samples of each domain that are left over, all sorted."""
        parts: list[Ints] = []
        rests: list[Ints] = []
        each = self.num_clients // len(self._pools)
        for number, pool in enumerate(self._pools):
            own = sizes[number * each : (number + 1) * each]
            order = self.rng(DataStream.RULE, number).permutation(pool)
            *given, rest = Parts(order, np.append(own, len(order) - own.sum()))
            parts += [np.sort(part) for part in given]
            rests.append(np.sort(rest))
        return parts, rests

    def _sizes(self) -> Ints:
        """Training samples of each client, shape (m,)."""
        if not self._pools:
            raise PartitionError(
                "Domains needs samples with a domain, and no separate test set: use DomainFolders, or another rule"
            )
        each = self.num_clients // len(self._pools)
        have = np.array([len(pool) for pool in self._pools], dtype=np.int64)
        allowed = np.minimum(np.floor(have * self.max_share + 0.5).astype(np.int64), have - 1)
        most: Ints = np.repeat(np.maximum(allowed, 0) // each, each)
        asked = self.samples_per_client
        sizes = most if asked is None else check_sizes(asked, self.num_clients)
        sizes = np.minimum(sizes, most) if isinstance(asked, Integral) else sizes
        own = sizes.reshape(-1, each)
        short = np.flatnonzero((own == 0).any(axis=1) | (own.sum(axis=1) >= have))
        if len(short):
            number = int(short[0])
            raise PartitionError(
                f"Domains: the domain {self._names[number]!r} has {have[number]} samples, too few for {each} client(s) "
                f"(from client {number * each}) of {own[number].max() or 'any'} training samples and for their tests "
                f"(max_share {self.max_share}): lower num_clients or samples_per_client, or leave the domain out"
            )
        return sizes
