"""Random draws of many clients at once: those of a generator of NumPy's for each client, without making the generators.

A client's draws come from ``numpy.random.default_rng([*key, client])``, so that they depend on no other client. To make
a generator takes longer than to draw twenty numbers from it. Here the generators of many clients (PCG64, seeded by
SeedSequence) are arrays, which step together. Clients with many draws are left to NumPy.

Sources: O'Neill, "PCG: a family of simple fast space-efficient statistically good algorithms for random number
generation" (HMC-CS-2014-0905); Lemire, "Fast random integer generation in an interval" (2019); Bentley and Floyd, "A
sample of brilliance" (1987).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pfl_lightning.datamodules.counting import Ints, Parts, class_counts

Words = npt.NDArray[Any]
State = list[npt.NDArray[np.uint64]]

BLOCK = 8192
"""Clients whose generators step together: few enough for the cache, many enough that calls of NumPy do not count."""

MOST = 500
"""Greatest number of draws of a client that steps with others; from here on ``choice`` draws in another way."""

_ONE, _HALF, _LOW = np.uint64(1), np.uint64(32), np.uint64(0xFFFFFFFF)


def blocks(num_clients: int, num_classes: int) -> Iterator[slice]:
    """Consecutive clients, a few thousand at a time; fewer of many classes, for tables with a column for each."""
    size = max(1, min(BLOCK, 2**20 // num_classes))
    return (slice(first, min(first + size, num_clients)) for first in range(0, num_clients, size))


def draw_of_classes(
    labels: Ints, parts: Parts, number: Callable[[Ints, slice], Ints], key: Sequence[int], first: int = 0
) -> npt.NDArray[np.bool_]:
    """Random subset of each client's samples with given numbers of each class.

    Args:
        labels: Class of each sample, shape (N,).
        parts: Samples of each client.
        number: Number that is drawn of each class, shape (k, C), at most what there is, from the numbers that k
            consecutive clients hold, and these clients.
        key: Numbers that say what is drawn, such as a seed and a purpose.
        first: Id of the first client.

    Returns:
        True where a sample of ``parts`` is drawn, shape of ``parts.values``.

    Example:
        >>> labels, parts = np.array([0, 0, 0, 1, 1, 1]), Parts(np.arange(6), np.array([6]))
        >>> drawn = draw_of_classes(labels, parts, lambda held, clients: np.array([[1, 2]]), key=[0])
        >>> labels[parts.values[drawn]].tolist()
        [0, 1, 1]
    """
    num_classes, chosen = int(labels.max(initial=0)) + 1, np.zeros(len(parts.values), dtype=np.bool_)
    for block in blocks(len(parts), num_classes):
        own = parts.block(block)
        table = class_counts(labels, own, num_classes)
        wanted, held = number(table, block).ravel(), table.ravel()
        if wanted.any():
            order = permutations(key, np.arange(block.start, block.stop) + first, own.sizes)
            order += np.repeat(own.ends - own.sizes, own.sizes)
            kinds = own.owners * num_classes + labels[own.values]
            order = order[np.argsort(kinds[order], kind="stable")]  # by client and class, random within them
            place = np.arange(len(order)) - np.repeat(np.cumsum(held) - held, held)
            chosen[parts.ends[block.start] - own.sizes[0] + order[place < np.repeat(wanted, held)]] = True
    return chosen


def permutations(key: Sequence[int], clients: Ints, sizes: Ints) -> Ints:
    """What ``default_rng([*key, client]).permutation(size)`` gives for each client, one after another.

    Args:
        key: Numbers that say what is drawn, such as a seed and a purpose.
        clients: Ids, shape (k,).
        sizes: Length of each permutation, shape (k,).

    Returns:
        Shape (sum of sizes,).

    Example:
        >>> permutations([0, 7], np.array([3, 4]), np.array([4, 2])).tolist()
        [3, 2, 1, 0, 1, 0]
        >>> np.random.default_rng([0, 7, 3]).permutation(4).tolist()
        [3, 2, 1, 0]
    """
    starts, many = np.cumsum(sizes) - sizes, sizes > _most(len(sizes))
    found: Ints = np.arange(sizes.sum()) - np.repeat(starts, sizes)
    for place in np.flatnonzero(many).tolist():
        rng = np.random.default_rng([*key, int(clients[place])])
        found[starts[place] : starts[place] + sizes[place]] = rng.permutation(sizes[place])
    order = np.argsort(-sizes, kind="stable")[np.count_nonzero(many) :]
    starts, last = starts[order], np.maximum(sizes[order] - 1, 0)
    firsts = np.cumsum(last) - last  # Fisher and Yates: exchange the last with one up to it, then the one before, ...
    drawn = _draw(key, clients[order], last, np.repeat(last + firsts, last) - np.arange(last.sum()), masked=True)
    for step in range(last.max(initial=0)):
        live = np.searchsorted(-last, -step)  # those with more than this many exchanges
        one, other = starts[:live] + last[:live] - step, starts[:live] + drawn[firsts[:live] + step]
        found[one], found[other] = found[other], found[one]
    return found


def choices(key: Sequence[int], clients: Ints, wanted: Ints, pools: Parts) -> Ints:
    """What ``default_rng([*key, client])`` chooses for each client without repetition, sorted, one after another.

    A client draws ``choice(pool, number, replace=False, shuffle=False)`` from each pool in turn.

    Args:
        key: Numbers that say what is drawn, such as a seed and a purpose.
        clients: Ids, shape (k,).
        wanted: Number that each client draws from each pool, shape (k, C), at most what it has.
        pools: C lists, all of different numbers.

    Returns:
        Shape (sum of wanted,).

    Example:
        >>> pools = Parts(np.arange(20), np.array([9, 11]))
        >>> choices([0, 7], np.array([3, 4]), np.array([[1, 2], [0, 1]]), pools).tolist()
        [3, 9, 17, 14]
    """
    sizes, flat = wanted.sum(axis=1), wanted.ravel()
    many, owners = sizes > _most(len(sizes)), np.repeat(np.arange(len(sizes)), sizes)
    pool = np.repeat(np.tile(np.arange(len(pools)), len(sizes)), flat)
    # Floyd: one of the first k of the pool, then of the first k + 1, ...; the last may be any.
    limits = pools.sizes[pool] + np.arange(len(pool)) - np.repeat(np.cumsum(flat), flat)
    numbers, few = (pools.ends - pools.sizes)[pool], ~many[owners]
    numbers[few] += _draw(key, clients[~many], sizes[~many], limits[few], masked=False)
    found = Parts.sorted(pools.values[numbers], owners, len(sizes))
    # Of what a client has drawn before, Floyd's method takes another: that is left to NumPy.
    many[owners[1:][(np.diff(found.values) == 0) & (np.diff(owners) == 0)]] = True
    for place in np.flatnonzero(many).tolist():
        rng, row = np.random.default_rng([*key, int(clients[place])]), wanted[place]
        drawn = [rng.choice(pools[c], row[c], replace=False, shuffle=False) for c in np.flatnonzero(row).tolist()]
        found[place][:] = np.sort(np.concatenate(drawn))
    return found.values


def _most(num_clients: int) -> int:
    """Greatest number of draws for which it is faster to step together: each costs as much as a few clients alone."""
    return min(MOST, num_clients // 3)


def _draw(key: Sequence[int], clients: Ints, sizes: Ints, limits: Ints, *, masked: bool) -> Ints:
    """Whole numbers from 0 to each limit, drawn by each client in turn.

    Args:
        key: See :func:`permutations`.
        clients: Ids, shape (k,).
        sizes: Number of draws of each client, shape (k,).
        limits: Greatest value of each draw, shape (sum of sizes,), below 2^32 - 1; 0 takes no random word.
        masked: Whether the low bits of a word are taken, and the word left out if they are above the limit; else the
            high half of its product with the number of values, and the word left out if the low half is too small.
    """
    drawn, random = np.zeros(len(limits) + 1, dtype=np.uint64), np.flatnonzero(limits)
    ends = np.searchsorted(random, np.cumsum(sizes))
    place = np.append(0, ends)[:-1]
    random = np.append(random, len(limits))  # where those write that have finished
    bounds = masks = np.append(limits, 1)[random].astype(np.uint64)
    for shift in (1, 2, 4, 8, 16):
        masks = masks | masks >> np.uint64(shift)
    state = _seeded(key, clients)
    while len(live := np.flatnonzero(place < ends)):
        if 2 * len(live) <= len(place):
            place, ends, state = place[live], ends[live], [part[live] for part in state]
        state[:2] = _step(*state)
        turn, mixed = state[0] >> np.uint64(58), state[0] ^ state[1]
        word = mixed >> turn | mixed << (-turn & np.uint64(63))
        for half in (word & _LOW, word >> _HALF):
            at = np.where(place < ends, place, len(bounds) - 1)
            if masked:
                value = half & masks[at]
                counts = value <= bounds[at]
            else:
                number = bounds[at] + _ONE
                value, counts = half * number >> _HALF, half * number & _LOW >= (_LOW + _ONE - number) % number
            drawn[random[at]] = value
            place = place + counts
    return drawn[:-1].astype(np.int64)


def _step(high: Words, low: Words, more_high: Words, more_low: Words) -> State:
    """The next state of each generator, modulo 2^128: its product with a constant, and its own increment."""
    by_high, by_low = np.uint64(0x2360ED051FC65DA4), np.uint64(0x4385DF649FCCF645)
    first, second = (low >> _HALF) * (by_low & _LOW), (low & _LOW) * (by_low >> _HALF)
    carry = ((low & _LOW) * (by_low & _LOW) >> _HALF) + (first & _LOW) + (second & _LOW)
    upper = (low >> _HALF) * (by_low >> _HALF) + (first >> _HALF) + (second >> _HALF) + (carry >> _HALF)
    new_low = low * by_low + more_low
    return [upper + high * by_low + low * by_high + more_high + (new_low < more_low), new_low]


def _seeded(key: Sequence[int], clients: Ints) -> State:
    """State and increment of each client's generator, in halves: those of ``PCG64(SeedSequence([*key, client]))``."""
    zero = np.zeros(len(clients), dtype=np.uint32)
    shifts = [(number, shift) for number in key for shift in range(0, max(number.bit_length(), 1), 32)]
    words = [*(zero + np.uint32(number >> shift & 0xFFFFFFFF) for number, shift in shifts), clients.astype(np.uint32)]
    constant = 0x43B0D7E5

    def hashed(value: Words, multiplier: int = 0x931E8875) -> Words:
        nonlocal constant
        value, constant = value ^ np.uint32(constant), constant * multiplier & 0xFFFFFFFF
        value = value * np.uint32(constant)
        value ^= value >> np.uint32(16)
        return value

    def mix(one: Words, other: Words) -> Words:
        mixed: Words = one * np.uint32(0xCA01F9DD) - hashed(other) * np.uint32(0x4973F715)
        mixed ^= mixed >> np.uint32(16)
        return mixed

    pool = [hashed(word) for word in [*words, zero, zero, zero][:4]]
    for source in range(4):
        for place in {0, 1, 2, 3} - {source}:
            pool[place] = mix(pool[place], pool[source])
    for word in words[4:]:
        pool = [mix(own, word) for own in pool]
    constant = 0x8B51F9DD
    halves = [hashed(own, 0x58F38DED).astype(np.uint64) for own in pool * 2]
    high, low, more_high, more_low = (halves[n] | halves[n + 1] << _HALF for n in (0, 2, 4, 6))
    more_high, more_low = more_high << _ONE | more_low >> np.uint64(63), more_low << _ONE | _ONE
    new_low = low + more_low
    return [*_step(high + more_high + (new_low < more_low), new_low, more_high, more_low), more_high, more_low]
