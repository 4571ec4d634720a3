"""Partition rules with designed class proportions: IID, dominant classes, classes per client."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pfl_lightning.checks import check_between
from pfl_lightning.datamodules import counting
from pfl_lightning.datamodules.counting import Floats, Ints, Labels, Parts
from pfl_lightning.datamodules.partition.base import (
    Partitioner,
    PartitionError,
    check_labels,
    check_sizes,
    check_total,
    checked_sizes,
)
from pfl_lightning.seeding import DataStream


class IID(Partitioner):
    """Random samples of the whole data set for every client, without replacement.

    Args:
        num_clients: Number of clients m.
        samples_per_client: Size of each client, or one size per client; None to assign all samples, in sizes that
            differ by one sample at most.
        seed: Seed of the random choice.

    Example:
        >>> import numpy as np
        >>> from pfl_lightning.datamodules import IID
        >>> [len(indices) for indices in IID(num_clients=3).partition(np.zeros(10, dtype=int))]
        [4, 3, 3]
    """

    needs_labels = False

    def __init__(self, num_clients: int, samples_per_client: int | list[int] | None = None, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        self.samples_per_client = checked_sizes(samples_per_client, self.num_clients)

    def partition(self, labels: Labels) -> Sequence[Ints]:
        """Indices of each client's training samples, see :meth:`Partitioner.partition`."""
        num_samples = len(check_labels(labels))
        if self.samples_per_client is None:
            sizes = np.full(self.num_clients, num_samples // self.num_clients)
            sizes[: num_samples % self.num_clients] += 1
        else:
            sizes = check_sizes(self.samples_per_client, self.num_clients)
        check_total(np.maximum(sizes, 1), num_samples)
        order = self.rng(DataStream.RULE).permutation(num_samples)[: sizes.sum()]
        return Parts.sorted(order, np.repeat(np.arange(self.num_clients), sizes), self.num_clients)


class DominantClasses(Partitioner):
    """Clients of equal size with a few dominant classes each (FedPAC, ICLR 2023, section 6.1 and appendix B.2).

    A share of every client's samples is spread evenly over all classes, the rest evenly over the dominant classes of
    its group. Groups are contiguous blocks of clients, as in the paper's figures: client k of m belongs to group
    ``k * len(groups) // m``. Fractions of a sample are rounded so that every client has its exact size and each count
    is within one of its share.

    Args:
        num_clients: Number of clients m.
        samples_per_client: Size of each client, or one size per client; None for the greatest equal size that the data
            allow.
        uniform_share: Share s of the samples that is spread over all classes, between 0 and 1.
        groups: Dominant classes of each group. None for the paper's: three consecutive classes, starting at every
            second class (10 classes: 0-2, 2-4, 4-6, 6-8, 8-0; other numbers, too, wrapping around at the end), and
            digits, upper case and lower case for the 62 classes of EMNIST byclass.
        seed: Seed of the random choice.
        overlap: Whether clients may share samples if a class is short. The paper's 100 clients of 600 samples on the
            50,000 images of CIFAR-10 are possible only with it. One client's validation images may then be another
            client's training images, as each client's samples are split independently.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import numpy as np
        >>> from pfl_lightning.datamodules import DominantClasses, class_counts
        >>> labels = np.repeat(np.arange(4), 50)
        >>> rule = DominantClasses(num_clients=4, samples_per_client=20, groups=[[0, 1], [2, 3]])
        >>> class_counts(labels, rule.partition(labels), num_classes=4)  # 20 % over all classes, 80 % dominant
        array([[9, 9, 1, 1],
               [9, 9, 1, 1],
               [1, 1, 9, 9],
               [1, 1, 9, 9]])
    """

    def __init__(
        self,
        num_clients: int,
        samples_per_client: int | list[int] | None = None,
        uniform_share: float = 0.2,
        groups: list[list[int]] | None = None,
        seed: int = 0,
        overlap: bool = False,
    ) -> None:
        super().__init__(num_clients, seed)
        check_between("uniform_share", uniform_share, 0, 1)
        self.samples_per_client = checked_sizes(samples_per_client, self.num_clients)
        numbers = [number for group in groups or () for number in group]
        if groups is not None and not (groups and all(groups) and all(isinstance(one, Integral) for one in numbers)):
            raise ValueError(f"groups must be non-empty lists of dominant classes, whole numbers, got {groups}")
        self.uniform_share, self.groups, self.overlap = uniform_share, groups, overlap

    def partition(self, labels: Labels) -> Sequence[Ints]:
        """Indices of each client's training samples, see :meth:`Partitioner.partition`."""
        array = check_labels(labels)
        shares = self._shares(np.unique(array), int(array.max()) + 1)
        return distribute_shares(self, array, shares, self.rng(DataStream.RULE))

    def _shares(self, present: Ints, num_classes: int) -> Floats:
        usual = [[int(present[place]) for place in group] for group in dominant_groups(len(present))]
        groups = self.groups or usual
        unknown = sorted({number for group in groups for number in group} - set(present.tolist()))
        if unknown:
            raise PartitionError(f"groups name class {unknown[0]}, the data have {present.tolist()}: correct groups")
        shares = np.zeros((len(groups), num_classes))
        shares[:, present] = self.uniform_share / len(present)
        for own, group in zip(shares, map(set, groups), strict=True):
            own[sorted(group)] += (1.0 - self.uniform_share) / len(group)
        return shares[np.arange(self.num_clients) * len(groups) // self.num_clients]


class ClassesPerClient(Partitioner):
    """Equal amounts of S classes for every client (DC-PFL, FedClassAvg, Calibre: Q-non-iid, FedPAC, appendix C.7).

    Every client gets exactly S distinct classes, and the numbers of clients that hold a class differ by one at most.
    Every client has the same size; the counts of its classes differ by one sample at most.

    Args:
        num_clients: Number of clients m.
        classes_per_client: Number of classes S of each client; or a list with one number per group of clients (FedPAC
            C.7: 3, 3, 5, 5, 8), where client k of m belongs to group ``k * len(list) // m``.
        samples_per_client: Size of each client, or one size per client; None for the greatest equal size that the data
            allow.
        seed: Seed of the random choice.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import numpy as np
        >>> from pfl_lightning.datamodules import ClassesPerClient, class_counts
        >>> labels = np.repeat(np.arange(4), 20)
        >>> rule = ClassesPerClient(num_clients=4, classes_per_client=2)
        >>> class_counts(labels, rule.partition(labels), num_classes=4)
        array([[ 0,  0, 10, 10],
               [ 0, 10,  0, 10],
               [10, 10,  0,  0],
               [10,  0, 10,  0]])
    """

    overlap: ClassVar[bool] = False

    def __init__(
        self,
        num_clients: int,
        classes_per_client: int | list[int] = 2,
        samples_per_client: int | list[int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(num_clients, seed)
        per_group = np.atleast_1d(classes_per_client)
        if not len(per_group) or not np.issubdtype(per_group.dtype, np.integer) or per_group.min() < 1:
            raise ValueError(f"classes_per_client must be whole numbers of at least 1, got {classes_per_client}")
        self.classes_per_client, self.samples_per_client = classes_per_client, samples_per_client
        groups = np.arange(self.num_clients) * len(per_group) // self.num_clients
        self._num_held = per_group[groups]

    def partition(self, labels: Labels) -> Sequence[Ints]:
        """Indices of each client's training samples, see :meth:`Partitioner.partition`."""
        array = check_labels(labels)
        present = np.unique(array)
        rng = self.rng(DataStream.RULE)
        shares = np.zeros((self.num_clients, int(array.max()) + 1))
        shares[:, present] = self._assign_classes(len(present), rng) / self._num_held[:, None]
        return distribute_shares(self, array, shares, rng)

    def _assign_classes(self, num_classes: int, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
        if self._num_held.max() > num_classes:
            raise PartitionError(
                f"client {self._num_held.argmax()} should hold {self._num_held.max()} classes, the data have "
                f"{num_classes}: lower classes_per_client"
            )
        order = rng.permutation(self.num_clients)
        # The classes with the fewest holders come first, in random order among equals. After C clients with the same
        # number of classes all have equally many holders again: every C clients are a turn, and turns go side by side.
        alike = bool((self._num_held == self._num_held[0]).all())
        each = min(num_classes, self.num_clients) if alike else self.num_clients
        turns = -(-self.num_clients // each)
        draws = np.zeros((turns, each, num_classes))
        draws.reshape(-1, num_classes)[: self.num_clients] = rng.random((self.num_clients, num_classes)) * 0.5
        holders = np.repeat(np.arange(turns)[:, None] * float(self._num_held[0]), num_classes, axis=1)
        held = np.zeros((turns * each, num_classes), dtype=np.bool_)
        place, wanted = np.arange(turns)[:, None], self._num_held[order]
        for step in range(each):
            chosen = np.argsort(holders + draws[:, step])[:, : wanted[step]]
            held[place * each + step, chosen] = True
            holders[place, chosen] += 1
        return held[np.argsort(order)]


def distribute_shares(
    rule: DominantClasses | ClassesPerClient, labels: Ints, shares: Floats, rng: np.random.Generator
) -> Sequence[Ints]:
    """Index arrays of clients with given sizes and class proportions.

    Args:
        rule: The calling rule, which has the clients' sizes.
        labels: Class of each sample, shape (N,).
        shares: Class proportions of each client, shape (m, C), rows sum to one.
        rng: Source of the choice.

    Returns:
        One sorted index array per client.

    Raises:
        PartitionError: If a class is short.
    """
    asked, overlap = rule.samples_per_client, rule.overlap
    supply = np.bincount(labels, minlength=shares.shape[1]).astype(np.int64)
    offsets = counting.spread_offsets(len(shares), rng.random())
    possible = counting.largest_size(shares, supply, offsets, overlap)
    sizes = check_sizes(max(possible, 1) if asked is None else asked, len(shares))
    counts = counting.round_rows(shares * sizes[:, None], offsets)
    needed = counts.max(axis=0) if overlap else counts.sum(axis=0)
    if (needed > supply).any():
        worst = int(np.argmax(needed - supply))
        raise PartitionError(
            f"{type(rule).__name__}: class {worst} has {supply[worst]} samples, {needed[worst]} needed "
            f"({needed[worst] - supply[worst]} short) by {int((counts[:, worst] > 0).sum())} clients: "
            + (f"lower samples_per_client to at most {possible}, or num_clients" if possible else "lower num_clients")
        )
    return counting.distribute(labels, counts, rng)


def dominant_groups(num_classes: int) -> list[list[int]]:
    """Dominant classes of each group in the FedPAC paper, see :class:`DominantClasses`.

    Args:
        num_classes: Number of classes C.

    Returns:
        The classes of each group.

    Example:
        >>> dominant_groups(10)
        [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [8, 9, 0]]
    """
    if num_classes == 62:  # EMNIST byclass: 10 digits, 26 upper-case and 26 lower-case letters
        return [list(range(10)), list(range(10, 36)), list(range(36, 62))]
    return [[(start + i) % num_classes for i in range(3)] for start in range(0, num_classes, 2)]
