"""Integer arithmetic of partitions: rounding tables of shares to whole samples, and dealing samples by such tables.

Every partition rule comes down to a table ``counts`` of shape (clients, classes) that says how many samples of which
class each client gets. The functions here make such tables out of real-valued shares, without a loop over clients, and
turn a table into index arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_GOLDEN = (5**0.5 - 1) / 2


def spread_offsets(num_rows: int, start: float) -> Floats:
    """Evenly spread rounding offsets in [0, 1), also within every block of neighboring rows.

    Args:
        num_rows: Number of offsets m.
        start: Offset of the first row; any real number.

    Returns:
        Array of shape (m,): a golden-ratio sequence, whose every run of neighbors covers [0, 1) evenly.
    """
    return np.asarray((start + _GOLDEN * np.arange(num_rows)) % 1.0, dtype=np.float64)


def round_rows(targets: Floats, offsets: Floats) -> Ints:
    """Round every row to whole numbers that keep the row's sum.

    Every entry becomes its floor or its ceiling (systematic rounding of the running sum). Rows with equal targets get
    different entries rounded up, by their offsets, so that column sums stay close to the sums of the targets too.

    Args:
        targets: Non-negative, shape (m, C); every row sums to a whole number.
        offsets: Shape (m,), in [0, 1).

    Returns:
        Whole numbers of shape (m, C) with the row sums of ``targets``.
    """
    # Rounding the running sums removes the noise of floating point, which could turn a zero into a one.
    running = np.round(np.cumsum(targets, axis=1), 6)
    edges = np.floor(running + offsets[:, None]).astype(np.int64)
    return np.diff(edges, axis=1, prepend=0)


def apportion(targets: npt.NDArray[np.floating[Any]], totals: Ints, low: Ints, high: Ints) -> Ints:
    """Largest remainders with bounds: whole numbers near ``targets`` with given row sums.

    Args:
        targets: Shape (m, C).
        totals: Wanted row sums, shape (m,). Where the bounds do not allow them, the nearest sum that they do allow.
        low: Least value of each entry, shape (m, C).
        high: Greatest value of each entry, shape (m, C), nowhere below ``low``.

    Returns:
        Whole numbers of shape (m, C).
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


def largest_size(shares: Floats, supply: Ints, offsets: Floats) -> int:
    """Greatest equal client size for which the rounded shares stay within the supply.

    Args:
        shares: Class proportions, shape (m, C), rows sum to one.
        supply: Samples of each class, shape (C,).
        offsets: Rounding offsets, shape (m,).

    Returns:
        The size, 0 if not even one sample a client is possible.
    """
    fits, over = 0, int(supply.sum()) // len(shares) + 1
    while over - fits > 1:
        size = (fits + over) // 2
        if (round_rows(shares * size, offsets).sum(axis=0) <= supply).all():
            fits = size
        else:
            over = size
    return fits


def fill(weights: Floats, sizes: Ints, supply: Ints, rng: np.random.Generator) -> Ints:
    """Give every client its size, following its class weights as far as the classes last.

    Classes that run out are replaced by the client's own other classes, in the proportions of its weights; a client
    whose every class has run out takes the other classes in proportion to what is left. Every pass meets all sizes or
    empties a class, so that there are at most C passes.

    Args:
        weights: Non-negative class weights, shape (m, C).
        sizes: Samples of each client, shape (m,); their sum must not exceed the supply.
        supply: Samples of each class, shape (C,).
        rng: Source of the rounding offsets.

    Returns:
        Whole numbers of shape (m, C) with row sums ``sizes`` and column sums of at most ``supply``.
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


def distribute(labels: Ints, counts: Ints, rng: np.random.Generator) -> list[Ints]:
    """Deal random samples of each class to the clients.

    A class of which more is given than there is goes round again: clients then share samples, and no client has one
    twice.

    Args:
        labels: Class of each sample, shape (N,).
        counts: Samples of each class for each client, shape (m, C), each entry within the supply of its class.
        rng: Source of the order within each class.

    Returns:
        For each client the sorted indices of its samples; disjoint where the column sums are within the supply.
    """
    num_clients, num_classes = counts.shape
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]  # by class, random within a class
    pools = np.split(order, np.cumsum(np.bincount(labels, minlength=num_classes))[:-1])
    chosen = np.concatenate([np.resize(pool, given) for pool, given in zip(pools, counts.sum(axis=0), strict=True)])
    owners = np.repeat(np.tile(np.arange(num_clients), num_classes), counts.T.ravel())
    chosen = chosen[np.lexsort((chosen, owners))]
    return split_by_sizes(chosen, counts.sum(axis=1))


def split_by_sizes(values: Ints, sizes: Ints) -> list[Ints]:
    """Cut an array into consecutive pieces of the given sizes."""
    ends = np.cumsum(sizes)
    return [values[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]


def take_per_class(labels: Ints, counts: Ints, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Choose a random set of samples with a given number of each class.

    Args:
        labels: Class of each sample, shape (n,).
        counts: Number wanted of each class, shape (C,), within what there is.
        rng: Source of the choice.

    Returns:
        Boolean array of shape (n,): True where the sample is chosen.
    """
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    sorted_labels = labels[order]
    place = np.arange(len(labels)) - np.searchsorted(sorted_labels, sorted_labels)  # 0, 1, ... within each class
    chosen = np.zeros(len(labels), dtype=np.bool_)
    chosen[order[place < counts[sorted_labels]]] = True
    return chosen


def class_counts(labels: npt.ArrayLike, parts: Sequence[npt.NDArray[np.int64]], num_classes: int) -> Ints:
    """Count who holds how much of which class.

    Args:
        labels: Class of each sample, shape (N,).
        parts: Index arrays into ``labels``, one a client.
        num_classes: Number of classes C.

    Returns:
        Whole numbers of shape (clients, C).
    """
    array = np.asarray(labels)
    counts = [np.bincount(array[part], minlength=num_classes) for part in parts]
    return np.stack(counts).astype(np.int64) if counts else np.zeros((0, num_classes), dtype=np.int64)
