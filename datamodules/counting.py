"""Integer arithmetic of partitions: rounding of shares to whole samples, and index arrays from tables of counts.

Every partition rule comes down to a table ``counts`` of shape (clients, classes): the number of samples of each class
at each client. The functions here make such tables from real-valued shares, without a loop over clients, and turn a
table into one index array per client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[Any]

_GOLDEN = (5**0.5 - 1) / 2


def spread_offsets(num_rows: int, start: float) -> Floats:
    """Evenly spread rounding offsets in [0, 1), also within every block of neighboring rows.

    Args:
        num_rows: Number of offsets m.
        start: Offset of the first row; any real number.

    Returns:
        Array of shape (m,): a golden-ratio sequence. Every run of neighbors covers [0, 1) evenly.

    Example:
        >>> spread_offsets(4, start=0.0).round(2).tolist()
        [0.0, 0.62, 0.24, 0.85]
    """
    return np.asarray((start + _GOLDEN * np.arange(num_rows)) % 1.0, dtype=np.float64)


def round_rows(targets: Floats, offsets: Floats) -> Ints:
    """Whole numbers near ``targets`` with the same row sums.

    Every entry becomes its floor or its ceiling (systematic rounding of the running sum). Rows with equal targets get
    different entries rounded up, by their offsets. Column sums therefore also stay close to the sums of the targets.

    Args:
        targets: Non-negative, shape (m, C); every row sums to a whole number.
        offsets: Shape (m,), in [0, 1).

    Returns:
        Whole numbers of shape (m, C) with the row sums of ``targets``.

    Example:
        Three clients want 1.5 samples of each of two classes. Each gets 3 samples, and no class is favored:

        >>> targets = np.full((3, 2), 1.5)
        >>> round_rows(targets, spread_offsets(3, start=0.0)).tolist()
        [[1, 2], [2, 1], [1, 2]]
    """
    # Rounding the running sums removes the noise of floating point, which could turn a zero into a one.
    running = np.round(np.cumsum(targets, axis=1), 6)
    edges = np.floor(running + offsets[:, None]).astype(np.int64)
    return np.diff(edges, axis=1, prepend=0)


def apportion(targets: npt.NDArray[np.floating[Any]], totals: Ints, low: Ints, high: Ints) -> Ints:
    """Whole numbers near ``targets`` with given row sums and bounds, by largest remainders.

    Args:
        targets: Shape (m, C).
        totals: Wanted row sums, shape (m,). Where the bounds do not allow them, the nearest sum that they do allow.
        low: Least value of each entry, shape (m, C).
        high: Greatest value of each entry, shape (m, C), nowhere below ``low``.

    Returns:
        Whole numbers of shape (m, C).

    Example:
        Ten samples in the proportions 2.4 : 2.4 : 5.2, with at most four of the last class:

        >>> targets, low, high = np.array([[2.4, 2.4, 5.2]]), np.array([[0, 0, 0]]), np.array([[9, 9, 4]])
        >>> apportion(targets, np.array([10]), low, high).tolist()
        [[3, 3, 4]]
    """
    counts: Ints = np.clip(np.floor(targets + 1e-9).astype(np.int64), low, high)
    while True:
        missing: Ints = totals - counts.sum(axis=1)
        grow = (missing > 0)[:, None] & (counts < high)
        shrink = (missing < 0)[:, None] & (counts > low)
        if not (grow | shrink).any():
            return counts
        # One unit an entry and pass, first where it brings the entry nearest to its target.
        gain = np.where(grow, targets - counts, np.where(shrink, counts - targets, -np.inf))
        rank = np.argsort(np.argsort(-gain, axis=1, kind="stable"), axis=1)
        step = rank < np.abs(missing)[:, None]
        counts = counts + (step & grow) - (step & shrink)


def largest_size(shares: Floats, supply: Ints, offsets: Floats, overlap: bool = False) -> int:
    """Greatest equal client size for which the rounded shares stay within the supply, found by bisection.

    Where the rounding lets a size fit and a smaller one not, it may be one of the smaller.

    Args:
        shares: Class proportions, shape (m, C), rows sum to one.
        supply: Samples of each class, shape (C,).
        offsets: Rounding offsets, shape (m,).
        overlap: Whether clients may share samples, so that each by itself must stay within the supply.

    Returns:
        The size; 0 if not even one sample per client is possible.

    Example:
        Two clients want all of class 0 and half of each class. There are 30 samples of each class:

        >>> shares, supply = np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([30, 30])
        >>> largest_size(shares, supply, spread_offsets(2, start=0.0))
        20
    """
    fits, over = 0, int(supply.sum()) // (1 if overlap else len(shares)) + 1
    while over - fits > 1:
        size = (fits + over) // 2
        counts = round_rows(shares * size, offsets)
        if ((counts.max(axis=0) if overlap else counts.sum(axis=0)) <= supply).all():
            fits = size
        else:
            over = size
    return fits


def fill(weights: Floats, sizes: Ints, supply: Ints, rng: np.random.Generator) -> Ints:
    """Table of counts with given client sizes that follows the class weights as long as the supply lasts.

    A class that runs out is replaced by the client's other classes, in the proportions of its weights. A client whose
    classes have all run out takes the other classes in proportion to what is left. Every pass meets all sizes or
    empties a class, so there are at most C passes.

    Args:
        weights: Non-negative class weights, shape (m, C).
        sizes: Samples of each client, shape (m,); their sum must not exceed the supply.
        supply: Samples of each class, shape (C,).
        rng: Source of the rounding offsets.

    Returns:
        Whole numbers of shape (m, C) with row sums ``sizes`` and column sums of at most ``supply``.

    Example:
        Both clients prefer class 0, which has only 6 samples:

        >>> weights, sizes, supply = np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([5, 5]), np.array([6, 10])
        >>> counts = fill(weights, sizes, supply, np.random.default_rng(0))
        >>> counts.sum(axis=1).tolist(), bool((counts.sum(axis=0) <= supply).all())
        ([5, 5], True)
    """
    missing, left = sizes.copy(), supply.copy()
    counts = np.zeros(weights.shape, dtype=np.int64)
    for _ in range(weights.shape[1]):
        if not missing.any():
            break
        open_weights = np.where(left > 0, weights, 0.0)
        totals = open_weights.sum(axis=1, keepdims=True)
        # Weights as small as the smallest normal number count as none: dividing by them would overflow.
        shares = np.where(totals > 1e-300, open_weights / np.maximum(totals, 1e-300), left / left.sum())
        want = round_rows(shares * missing[:, None], spread_offsets(len(sizes), rng.random()))
        asked = want.sum(axis=0)
        short = np.flatnonzero(asked > left)
        if len(short):
            cut = want[:, short] * (left[short] / asked[short])
            want[:, short] = round_rows(cut.T, spread_offsets(len(short), rng.random())).T
        counts += want
        left -= want.sum(axis=0)
        missing -= want.sum(axis=1)
    return counts


def distribute(labels: Ints, counts: Ints, rng: np.random.Generator) -> Parts:
    """Index arrays that give each client the asked number of random samples of each class.

    Where the counts of a class exceed its supply, its samples are used again: clients then share samples, but no
    client has the same sample twice.

    Args:
        labels: Class of each sample, shape (N,).
        counts: Samples of each class for each client, shape (m, C), each entry within the supply of its class.
        rng: Source of the order within each class.

    Returns:
        For each client the sorted indices of its samples; disjoint where the column sums are within the supply.

    Example:
        >>> labels = np.array([0, 0, 0, 1, 1, 1])
        >>> counts = np.array([[2, 0], [1, 3]])  # client 0: two samples of class 0; client 1: the rest
        >>> indices = distribute(labels, counts, np.random.default_rng(0))
        >>> [labels[own].tolist() for own in indices]
        [[0, 0], [0, 1, 1, 1]]
    """
    num_clients, num_classes = counts.shape
    order = rng.permutation(len(labels))
    short = labels.astype(np.min_scalar_type(num_classes))  # of which NumPy sorts faster
    order = order[np.argsort(short[order], kind="stable")]  # by class, random within a class
    pools = np.split(order, np.cumsum(np.bincount(labels, minlength=num_classes))[:-1])
    chosen = np.concatenate([np.resize(pool, given) for pool, given in zip(pools, counts.sum(axis=0), strict=True)])
    owners = np.repeat(np.tile(np.arange(num_clients), num_classes), counts.T.ravel())
    return Parts.sorted(chosen, owners, num_clients)


class Parts(Sequence[Ints]):
    """Index lists of all clients in one array: a million lists would be a million objects.

    Args:
        values: The lists, one after another, shape (N,).
        sizes: Length of each list, shape (m,); their sum is N.

    Attributes:
        values: As given.
        sizes: As given.
        ends: Where each list ends, shape (m,).

    Example:
        >>> parts = Parts(np.array([4, 0, 1, 7]), np.array([1, 0, 3]))
        >>> [part.tolist() for part in parts], parts.owners.tolist()
        ([[4], [], [0, 1, 7]], [0, 2, 2, 2])
    """

    def __init__(self, values: Ints, sizes: Ints) -> None:
        self.values, self.sizes, self.ends = values, sizes, np.cumsum(sizes)

    @classmethod
    def of(cls, lists: Sequence[Labels]) -> Parts:
        """The lists, copied into one array unless they are in one already."""
        if isinstance(lists, Parts):
            return lists
        return cls(np.concatenate([np.empty(0, dtype=np.int64), *lists]).astype(np.int64), sizes_of(lists))

    @classmethod
    def sorted(cls, values: Ints, owners: Ints, num_clients: int) -> Parts:
        """The lists of values from 0 that have the given owners, ascending in each list."""
        span, sizes = int(values.max(initial=0)) + 1, np.bincount(owners, minlength=num_clients)
        keys = owners * span + values
        keys.sort()
        keys -= np.repeat(np.arange(num_clients) * span, sizes)
        return cls(keys, sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, client: int) -> Ints:  # type: ignore[override]  # of a number alone
        """A client's list, not copied."""
        end = self.ends[client]
        return self.values[end - self.sizes[client] : end]

    def block(self, clients: slice) -> Parts:
        """The lists of consecutive clients, at least one; not copied."""
        ends, sizes = self.ends[clients], self.sizes[clients]
        return Parts(self.values[ends[0] - sizes[0] : ends[-1]], sizes)

    @property
    def owners(self) -> Ints:
        """Client of each value, shape (N,)."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def owner(self, place: int) -> int:
        """Client of the value at a place."""
        return int(np.searchsorted(self.ends, place, side="right"))

    def where(self, mask: npt.NDArray[np.bool_]) -> Parts:
        """The values that a mask of shape (N,) keeps."""
        kept = np.append(0, np.cumsum(mask))
        return Parts(self.values[mask], kept[self.ends] - kept[self.ends - self.sizes])


def sizes_of(lists: Sequence[Labels]) -> Ints:
    """Length of each list, shape (m,)."""
    return lists.sizes if isinstance(lists, Parts) else np.array([len(own) for own in lists], dtype=np.int64)


def class_counts(labels: npt.ArrayLike, parts: Sequence[npt.NDArray[np.int64]], num_classes: int) -> Ints:
    """Number of samples of each class at each client.

    Args:
        labels: Class of each sample, shape (N,).
        parts: Index arrays into ``labels``, one per client.
        num_classes: Number of classes C.

    Returns:
        Whole numbers of shape (clients, C).

    Raises:
        ValueError: If a class is negative, or C or above.

    Example:
        >>> class_counts([0, 1, 1, 2], [np.array([0, 1]), np.array([2, 3])], num_classes=3).tolist()
        [[1, 1, 0], [0, 1, 1]]
    """
    own = Parts.of(parts)
    seen = np.asarray(labels)[own.values]
    if len(seen) and not 0 <= seen.min() <= seen.max() < num_classes:
        raise ValueError(f"classes must be from 0 to {num_classes - 1}, got {seen.min()} to {seen.max()}")
    kinds = own.owners * num_classes + seen
    return np.bincount(kinds, minlength=len(own) * num_classes).reshape(len(own), num_classes)
