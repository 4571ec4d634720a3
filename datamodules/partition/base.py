"""Base of the partition rules: the interface, the random streams, the checks and the clients' test splits."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from pfl_lightning.checks import check_at_least, check_seed
from pfl_lightning.datamodules.clients.views import ClientView
from pfl_lightning.datamodules.counting import Ints, Labels, Parts, apportion, class_counts
from pfl_lightning.datamodules.draws import blocks, choices
from pfl_lightning.notices import labels_of
from pfl_lightning.seeding import DataStream

LARGEST_SIZE = 2**31 - 1
"""Greatest size of a client, so that no product of two overflows."""

AS_STORED = ClientView()

UNUSED = 0.01
"""Share of the items up to which those that rounding leaves unused are not worth a warning."""


class PartitionError(ValueError):
    """Error of a partition that cannot be met: the class or client that is short, and what to change."""


class Partitioner(ABC):
    """Rule that assigns the samples of a data set to clients.

    A rule sees the labels only, and its index arrays are a pure function of (labels, arguments, seed). A subclass
    overrides :meth:`partition`. A rule that needs the domain of each sample also overrides :meth:`with_domains`; one
    that lets clients see their samples differently overrides :meth:`client_view`.

    Args:
        num_clients: Number of clients m.
        seed: Seed of every random choice, non-negative.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        A user-defined rule: consecutive blocks of samples, sorted by label.

        >>> import numpy as np
        >>> from pfl_lightning.datamodules import Partitioner
        >>> class SortedByLabel(Partitioner):
        ...     def partition(self, labels):
        ...         return np.array_split(np.argsort(labels, kind="stable"), self.num_clients)
        >>> labels = np.array([1, 0, 2, 1, 0, 2])
        >>> [labels[indices].tolist() for indices in SortedByLabel(num_clients=3).partition(labels)]
        [[0, 0], [1, 1], [2, 2]]
    """

    needs_labels: bool = True
    """True if the rule depends on classes; a rule with False also divides data without classes."""

    fixed_test: bool = False
    """True if the rule lists the test samples itself (read from a file) instead of drawing them."""

    fixed_train: bool = False
    """True if the rule lists training samples explicitly, so that indices must keep the data set's own order."""

    client_names: tuple[str, ...] = ()
    """A name for each client, where the data have names."""

    def __init__(self, num_clients: int, seed: int = 0) -> None:
        check_at_least("num_clients", num_clients, 1)
        check_seed("seed", seed)
        self.num_clients = int(num_clients)
        self.seed = int(seed)

    @abstractmethod
    def partition(self, labels: Labels) -> Sequence[Ints]:
        """Indices of each client's training samples.

        Args:
            labels: Class of each sample, whole numbers from 0, shape (N,).

        Returns:
            One index array into ``labels`` per client, disjoint.

        Raises:
            PartitionError: If the labels do not suffice for the rule.
        """

    def partition_test(
        self, test_labels: Labels, train_labels_per_client: Sequence[Labels], samples_per_client: int | None = None
    ) -> Sequence[Ints]:
        """Indices of each client's test samples, in the class proportions of its own training samples.

        Each client draws without replacement and independently of the others, so two clients may share a test sample. A
        client gets as many samples as it trains on, or ``samples_per_client``. If the test set is short of a class, the
        client's whole test split shrinks, so that the proportions hold. Proportions are rounded by largest remainders.
        Every class that the client trains on is represented if the test set has it and the split is large enough.

        Args:
            test_labels: Class of each test sample, shape (M,).
            train_labels_per_client: Classes of each client's training samples.
            samples_per_client: Greatest size of a client's test split; None for the size of its training split.

        Returns:
            One sorted index array into ``test_labels`` per client.

        Raises:
            PartitionError: If the test set has none of a client's classes.

        Example:
            A client with three samples of class 0 and one of class 1 is tested in the same proportions:

            >>> import numpy as np
            >>> from pfl_lightning.datamodules import IID
            >>> test_labels = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, 1])
            >>> (indices,) = IID(num_clients=1).partition_test(test_labels, [np.array([0, 0, 0, 1])])
            >>> test_labels[indices].tolist()
            [0, 0, 0, 1]
        """
        labels, trained = check_labels(test_labels), Parts.of(train_labels_per_client)
        num_classes = 1 + max(int(labels.max()), int(trained.values.max(initial=0)))
        available = np.bincount(labels, minlength=num_classes)
        pools = Parts.sorted(np.arange(len(labels)), labels, num_classes)
        clients, values, sizes = np.arange(len(trained)), [], []
        for block in blocks(len(trained), num_classes):
            own = trained.block(block)
            held = class_counts(own.values, Parts(np.arange(len(own.values)), own.sizes), num_classes)
            wanted = matching_counts(held, available, samples_per_client, block.start)
            values.append(choices([self.seed, DataStream.TEST], clients[block], wanted, pools))
            sizes.append(wanted.sum(axis=1))
        return Parts(np.concatenate(values), np.concatenate(sizes))

    def with_domains(self, domains: Ints, names: Sequence[str]) -> Partitioner:
        """Rule for data whose samples have a domain and that have no test set; this rule, unless overridden.

        Args:
            domains: Domain of each sample, from 0, shape (N,).
            names: A name for each domain.
        """
        return self

    def with_sizes(self, sizes: list[int]) -> Partitioner | None:
        """Copy of this rule with other client sizes; None if the rule has no ``samples_per_client``.

        Args:
            sizes: Training samples of each client.
        """
        if not hasattr(self, "samples_per_client"):
            return None
        other = copy.copy(self)
        other.samples_per_client = sizes
        return other

    def client_view(self, client: int, num_classes: int) -> ClientView:
        """View of a client on its samples; the samples as stored, unless overridden.

        Args:
            client: Id from 0.
            num_classes: Number of classes C of the data.
        """
        return AS_STORED

    def client_views(self, num_classes: int) -> tuple[ClientView, ...]:
        """View of each client; empty if all see the samples as stored."""
        if type(self).client_view is Partitioner.client_view:
            return ()
        views = tuple(self.client_view(client, num_classes) for client in range(self.num_clients))
        return () if all(view.is_identity for view in views) else views

    @property
    def fixed_sizes(self) -> bool:
        """True if the user has set how many samples clients get; the rest is left unused on purpose."""
        return getattr(self, "samples_per_client", None) is not None

    def fixed_validation(self) -> Sequence[Ints] | None:
        """Validation samples of each client if the rule lists them; None for a share of the training samples."""
        return None

    def fixed_unlabeled(self, num_samples: int) -> Sequence[Ints] | None:
        """Unlabeled samples of each client, out of ``num_samples``; None for equal shares at random."""
        return None

    def named(self, clients: Sequence[int], most: int = 5) -> str:
        """Numbers and names of clients for messages, not more than a few."""
        return labels_of(clients, self.client_names, most)

    def rng(self, *stream: int) -> np.random.Generator:
        """Random generator of one purpose, independent of every other purpose's.

        Args:
            stream: Numbers that identify the purpose, for instance a stream and a client.
        """
        return np.random.default_rng([self.seed, *stream])


def matching_counts(trained: Ints, available: Ints, samples_per_client: int | None, first: int = 0) -> Ints:
    """Number of test samples of each class that each client draws.

    Args:
        trained: Number of training samples of each class, shape (m, C).
        available: Number of test samples of each class, shape (C,).
        samples_per_client: Greatest size of a client's test split; None for the size of its training split.
        first: Id of the first client, for errors.

    Returns:
        Whole numbers of shape (m, C), at most ``available`` in each class.

    Raises:
        PartitionError: If the test set has none of a client's classes.

    Example:
        The test set has only 10 samples of class 0, so the client's 3 : 1 proportions allow 13 samples:

        >>> matching_counts(np.array([[30, 10]]), np.array([10, 50]), samples_per_client=None).tolist()
        [[10, 3]]
    """
    held = np.where(available > 0, trained, 0)
    totals = held.sum(axis=1)
    if (totals == 0).any():
        client = int(np.flatnonzero(totals == 0)[0])
        classes = np.flatnonzero(trained[client]).tolist()
        raise PartitionError(
            f"client {first + client} trains on classes {classes}, and the test set has no sample of any of them: "
            "give a test set with the training set's classes, or split the test samples off the training set"
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


def whole_numbers(values: Any) -> Ints:
    """A list of whole numbers as int64.

    Raises:
        ValueError: If it is none.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"{array.dtype} of shape {array.shape} instead of a list of whole numbers")
    return array.astype(np.int64)


def check_labels(labels: Labels) -> Ints:
    """Class labels as int64, after a check.

    Raises:
        ValueError: If the array is empty, not one-dimensional, not of whole numbers, or has a negative label.
    """
    array = whole_numbers(labels)
    if len(array) == 0 or array.min() < 0:
        raise ValueError(f"labels must be classes from 0, one per sample, got {array.min() if len(array) else 'none'}")
    return array


def check_sizes(samples_per_client: int | list[int], num_clients: int) -> Ints:
    """Client sizes as an array of shape (m,), from one size for all or a list of sizes.

    Raises:
        ValueError: If a size is below 1, or the list does not have one size per client.
    """
    sizes = np.asarray(samples_per_client)
    fits = np.issubdtype(sizes.dtype, np.integer) and sizes.shape in ((), (num_clients,))
    if not fits or ((sizes < 1) | (sizes > LARGEST_SIZE)).any():
        raise ValueError(
            f"samples_per_client must be a whole number from 1 to {LARGEST_SIZE}, or one for each of the {num_clients} "
            f"clients, got {samples_per_client}"
        )
    return np.broadcast_to(sizes, (num_clients,)).astype(np.int64)


def checked_sizes(samples_per_client: int | list[int] | None, num_clients: int) -> int | list[int] | None:
    """Sizes as they are given, checked where there are some; see :func:`check_sizes`."""
    if samples_per_client is not None:
        check_sizes(samples_per_client, num_clients)
    return samples_per_client


def check_total(sizes: Ints, num_samples: int, option: str = "samples_per_client") -> None:
    """Check that the data have enough samples for all client sizes.

    Args:
        sizes: Samples of each client, shape (m,).
        num_samples: Number of samples of the data.
        option: What asks for the sizes.

    Raises:
        PartitionError: If the sum of the sizes exceeds the number of samples.
    """
    needed = int(sizes.sum())
    if needed > num_samples:
        each = num_samples // len(sizes)
        raise PartitionError(
            f"{len(sizes)} clients need {needed} samples in all, the data have {num_samples} "
            f"({needed - num_samples} short): lower "
            + (f"{option} (to at most {each}) or num_clients" if each else f"num_clients (to at most {num_samples})")
        )


def check_parts(rule: Partitioner, parts: Any, num_samples: int) -> Parts:
    """Index lists of a rule's ``partition``, after a check, since rules are also written by users.

    Warnings say how many indices are listed more than once, by one client or several, and how many in none, unless a
    size or a list of items has asked for it.

    Args:
        rule: The rule, named in errors.
        parts: Return value of the rule's ``partition``.
        num_samples: Number of samples that the rule was shown.

    Raises:
        PartitionError: If it is not one list of indices in range per client.

    Example:
        >>> from pfl_lightning.datamodules import IID
        >>> [part.tolist() for part in check_parts(IID(num_clients=2), [[0, 1], [2]], num_samples=3)]
        [[0, 1], [2]]
    """
    where, number = f"{type(rule).__name__}.partition", len(parts) if hasattr(parts, "__len__") else -1
    if number != rule.num_clients:
        got = f"{number} index lists" if number >= 0 else f"a {type(parts).__name__}"
        raise PartitionError(f"{where} gave {got}, expected {rule.num_clients} index lists, one per client")
    if not isinstance(parts, Parts):
        parts = [_check_part(f"{where}: client {client}", part) for client, part in enumerate(parts)]
    found = Parts.of(parts)
    if len(outside := np.flatnonzero((found.values < 0) | (found.values >= num_samples))):
        raise PartitionError(
            f"{where}: client {found.owner(outside[0])} got index {found.values[outside[0]]}, expected whole numbers "
            f"from 0 to {num_samples - 1}"
        )
    if rule.fixed_train:  # a file's indices have their own warning
        return found
    base, times = getattr(rule, "base", rule), np.bincount(found.values, minlength=num_samples)
    if (again := len(found.values) - np.count_nonzero(times)) and not getattr(base, "overlap", False):
        warnings.warn(
            f"{where} lists indices more than once, for one client or several: {again} too many, first "
            f"{np.argmax(times > 1)}."
            " Clients may train on samples that others hold for validation. The lists of a rule should be disjoint",
            stacklevel=2,
        )
    if (held := rule.fixed_validation()) is not None:
        times += np.bincount(Parts.of(held).values, minlength=num_samples)
    unused = np.count_nonzero(times == 0)
    if not rule.fixed_sizes and unused > UNUSED * num_samples:
        remedy = ", or set samples_per_client to ask for these sizes" if hasattr(base, "samples_per_client") else ""
        warnings.warn(
            f"{type(base).__name__} leaves {unused} of {num_samples} training items unused with {rule.num_clients} "
            f"clients: choose another num_clients, or another rule, to use more of them{remedy}",
            stacklevel=2,
        )
    return found


def _check_part(who: str, part: Any) -> Ints:
    try:
        return whole_numbers(part)
    except (ValueError, TypeError) as error:
        raise PartitionError(f"{who} got no index list: {error}") from error
