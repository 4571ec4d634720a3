"""What every partition rule shares: the interface, its random streams, its errors and the clients' test parts."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pfl_lightning.datamodules.clients.views import ClientView
from pfl_lightning.datamodules.counting import Ints, apportion, class_counts
from pfl_lightning.seeding import DataStream

_PLAIN_VIEW = ClientView()  # one object, however many clients have it


class PartitionError(ValueError):
    """A partition that cannot be met, with the class or client that is short and what to change."""


class Partitioner(ABC):
    """A rule that says which client holds which samples.

    A rule knows labels and nothing else, and its parts are a pure function of (labels, arguments, seed). A rule that
    asks for more overrides :meth:`with_domains` (which domain each sample is of) or :meth:`client_view` (how a client
    sees its samples); a rule of one's own needs neither.

    Args:
        num_clients: Number of clients m.
        seed: Seed of every random choice, non-negative.

    Raises:
        ValueError: If an argument is out of range.
    """

    needs_labels: bool = True
    """Whether the parts depend on classes; a rule that says no also divides data that have none."""

    def __init__(self, num_clients: int, seed: int = 0) -> None:
        if int(num_clients) != num_clients or num_clients < 1:
            raise ValueError(f"num_clients must be a whole number of at least 1, got {num_clients!r}")
        if int(seed) != seed or seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
        self.num_clients = int(num_clients)
        self.seed = int(seed)

    @abstractmethod
    def partition(self, labels: npt.NDArray[Any]) -> list[Ints]:
        """Say which training samples each client holds.

        Args:
            labels: Class of each sample, whole numbers from 0, shape (N,).

        Returns:
            One index array into ``labels`` a client, disjoint.

        Raises:
            PartitionError: If the labels do not suffice for the rule.
        """

    def partition_test(
        self,
        test_labels: npt.NDArray[Any],
        train_labels_per_client: Sequence[npt.NDArray[Any]],
        samples_per_client: int | None = None,
    ) -> list[Ints]:
        """Draw each client's test samples in the class proportions of its own training samples.

        Each client draws without replacement, independently of the others: what one client gets does not depend on how
        many others there are, and two clients may share a test image. A client gets as many samples as it
        trains on, or ``samples_per_client``; where the test set is short of a class, the client's whole part shrinks,
        so that the proportions hold. Proportions are rounded by largest remainders, and every class the client trains
        on is represented as long as the part has room and the test set has it.

        Args:
            test_labels: Class of each test sample, shape (M,).
            train_labels_per_client: The classes of each client's training samples.
            samples_per_client: Greatest size of a client's test part; None for the size of its training part.

        Returns:
            One sorted index array into ``test_labels`` a client.

        Raises:
            PartitionError: If the test set has none of a client's classes.
        """
        labels = check_labels(test_labels)
        num_classes = 1 + max([int(labels.max()), *(int(np.max(own, initial=0)) for own in train_labels_per_client)])
        available = np.bincount(labels, minlength=num_classes).astype(np.int64)
        trained = np.stack([np.bincount(own, minlength=num_classes) for own in train_labels_per_client])
        counts = matching_counts(trained.astype(np.int64), available, samples_per_client)
        pools = [np.flatnonzero(labels == c) for c in range(num_classes)]
        parts = []
        for client, wanted in enumerate(counts):
            rng = self.rng(DataStream.TEST, client)
            drawn = [rng.choice(pools[c], wanted[c], replace=False, shuffle=False) for c in np.flatnonzero(wanted)]
            parts.append(np.sort(np.concatenate(drawn)).astype(np.int64))
        return parts

    def with_domains(self, domains: Ints, names: Sequence[str]) -> Partitioner:
        """The rule to use for data whose samples have a domain and that have no test set; most rules do not care.

        Args:
            domains: Domain of each sample, from 0, shape (N,).
            names: A name for each domain.
        """
        return self

    def with_sizes(self, sizes: list[int]) -> Partitioner | None:
        """The same rule with other client sizes, None if the rule takes none.

        Args:
            sizes: Training samples of each client.
        """
        if not hasattr(self, "samples_per_client"):
            return None
        other = copy.copy(self)
        other.samples_per_client = sizes
        return other

    def client_view(self, client: int, num_classes: int) -> ClientView:
        """How a client sees its samples: as they are, unless the rule says otherwise.

        Args:
            client: Id from 0.
            num_classes: Number of classes C of the data.
        """
        return _PLAIN_VIEW

    @property
    def fixed_test(self) -> bool:
        """Whether the rule itself names the test samples (read from a file) instead of drawing them."""
        return False

    @property
    def fixed_train(self) -> bool:
        """Whether the rule names training samples one by one, so that indices must keep the data set's own order."""
        return False

    def fixed_validation(self) -> list[Ints] | None:
        """The validation samples of each client where the rule names them, else None (a share is split off)."""
        return None

    def fixed_unlabeled(self, num_samples: int) -> list[Ints] | None:
        """Each client's samples without labels, of ``num_samples``; None for equal shares at random."""
        return None

    def rng(self, *stream: int) -> np.random.Generator:
        """Random numbers of one purpose, independent of every other purpose's.

        Args:
            stream: Numbers that name the purpose, e.g. a stream and a client.
        """
        return np.random.default_rng([self.seed, *stream])


def matching_counts(trained: Ints, available: Ints, samples_per_client: int | None) -> Ints:
    """How many test samples of each class each client draws.

    Args:
        trained: Training samples of each class, shape (m, C).
        available: Samples of each class in the test set, shape (C,).
        samples_per_client: Greatest size of a client's test part, None for the size of its training part.

    Returns:
        Whole numbers of shape (m, C), nowhere above ``available``.

    Raises:
        PartitionError: If the test set has none of a client's classes.
    """
    if samples_per_client is not None and samples_per_client < 1:
        raise ValueError(f"test samples_per_client must be at least 1 or None, got {samples_per_client}")
    held = np.where(available > 0, trained, 0)
    totals = held.sum(axis=1)
    if (totals == 0).any():
        client = int(np.flatnonzero(totals == 0)[0])
        classes = np.flatnonzero(trained[client]).tolist()
        raise PartitionError(
            f"client {client} trains on classes {classes}, and the test set has no sample of any of them: "
            "give a test set with the training set's classes, or split a test part off the training set"
        )
    shares = held / totals[:, None]
    sizes = trained.sum(axis=1)
    if samples_per_client is not None:
        sizes = np.minimum(sizes, samples_per_client)
    with np.errstate(divide="ignore", invalid="ignore"):
        largest = np.where(held > 0, available / shares, np.inf).min(axis=1)
    num_held = (held > 0).sum(axis=1)
    kept = np.maximum(np.floor(np.minimum(sizes, largest) + 1e-9).astype(np.int64), np.minimum(num_held, sizes))
    low = ((held > 0) & (kept >= num_held)[:, None]).astype(np.int64)
    return apportion(shares * kept[:, None], kept, low, np.where(held > 0, available, 0))


def check_labels(labels: npt.NDArray[Any]) -> Ints:
    """Check an array of class labels and return it as int64.

    Raises:
        ValueError: If it is empty, not one-dimensional, not of whole numbers, or has a negative label.
    """
    array = np.asarray(labels)
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"labels must be a non-empty one-dimensional array, got shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"labels must be whole numbers, got dtype {array.dtype}")
    if array.min() < 0:
        raise ValueError(f"labels must count from 0, got {array.min()}")
    return array.astype(np.int64)


def check_sizes(samples_per_client: int | list[int], num_clients: int) -> Ints:
    """Turn a size for all or a list of sizes into an array of shape (m,).

    Raises:
        ValueError: If a size is below 1 or the list has not one size a client.
    """
    sizes = np.asarray(samples_per_client)
    if not np.issubdtype(sizes.dtype, np.integer) or sizes.ndim > 1 or (sizes < 1).any():
        raise ValueError(f"samples_per_client must be whole numbers of at least 1, got {samples_per_client}")
    if sizes.ndim == 1 and len(sizes) != num_clients:
        raise ValueError(f"samples_per_client lists {len(sizes)} sizes for {num_clients} clients: give one a client")
    return np.broadcast_to(sizes, (num_clients,)).astype(np.int64)


def check_total(sizes: Ints, num_samples: int) -> None:
    """Check that all sizes together fit into the data.

    Raises:
        PartitionError: If they do not.
    """
    needed = int(sizes.sum())
    if needed > num_samples:
        raise PartitionError(
            f"{len(sizes)} clients need {needed} samples in all, the data have {num_samples} "
            f"({needed - num_samples} short): lower samples_per_client to at most {num_samples // len(sizes)} or "
            "num_clients"
        )


__all__ = ["PartitionError", "Partitioner", "class_counts"]
