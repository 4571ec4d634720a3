"""Division of a data set: every client's training, validation and test indices from a partition rule."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.datamodules.counting import Ints, apportion, class_counts, take_per_class
from pfl_lightning.datamodules.partition.base import (
    Partitioner,
    PartitionError,
    check_parts,
)
from pfl_lightning.seeding import DataStream


class IndexLists:
    """Index lists of all clients in one tensor, so that thousands of clients do not need as many objects.

    Args:
        lists: One array of indices per client.

    Example:
        >>> lists = IndexLists([np.array([4, 1]), np.array([7])])
        >>> len(lists), lists.sizes.tolist(), lists[0].tolist(), lists[1].tolist()
        (2, [2, 1], [4, 1], [7])
    """

    def __init__(self, lists: Sequence[Ints]) -> None:
        self.sizes = np.array([len(own) for own in lists], dtype=np.int64)
        self._ends = np.cumsum(self.sizes)
        self._flat = torch.from_numpy(np.concatenate([np.asarray(own, dtype=np.int64) for own in lists]))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, client: int) -> Tensor:
        """Indices of one client, shape (n,), int64: a view."""
        end = int(self._ends[client])
        return self._flat[end - int(self.sizes[client]) : end]

    def arrays(self) -> list[Ints]:
        """Lists of all clients as arrays."""
        return [self[client].numpy() for client in range(len(self))]

    def to_bytes(self) -> bytes:
        """Bytes of the sizes of all lists, then of their indices; the same on every machine."""
        return self.sizes.astype("<i8").tobytes() + self._flat.numpy().astype("<i8").tobytes()


@dataclass(frozen=True)
class Division:
    """Indices of every client's splits, in the data set's own order.

    Attributes:
        train: Training indices of each client.
        validation: Validation indices of each client, into the same samples.
        test: Test indices of each client, into the test set; into the same samples if there is no test set.
        held: Training and validation samples of all clients, sorted, each once: those that channel statistics may use.
            None if the data set has a test set, so that statistics may use every training sample.
        unlabeled: Indices of each client into the unlabeled samples; empty lists if there are none.
    """

    train: IndexLists
    validation: IndexLists
    test: IndexLists
    held: Ints | None
    unlabeled: IndexLists

    def fingerprint(self, num_train: int, num_test: int, num_unlabeled: int, views: bytes = b"") -> str:
        """Hash of all index lists and their order.

        Args:
            num_train: Number of training samples; of all samples if there is no test set.
            num_test: Number of test samples; 0 if there is no test set.
            num_unlabeled: Number of unlabeled samples.
            views: Bytes of the clients' views; empty if every client sees the samples as stored.

        Returns:
            16 hexadecimal digits.
        """
        digest = hashlib.sha256(np.array([num_train, num_test, len(self.train)], dtype="<i8").tobytes())
        for lists in (self.train, self.validation, self.test):
            digest.update(lists.to_bytes())
        digest.update(views)
        if num_unlabeled:
            digest.update(np.array(num_unlabeled, dtype="<i8").tobytes() + self.unlabeled.to_bytes())
        return digest.hexdigest()[:16]


def divide(
    rule: Partitioner,
    labels: Ints,
    test_labels: Ints | None,
    *,
    validation_share: float,
    test_share: float,
    test_samples_per_client: int | None,
    seed: int,
    domains: tuple[Ints, Sequence[str]] | None = None,
    num_unlabeled: int = 0,
    novel: Sequence[int] = (),
) -> Division:
    """Every client's training, validation and test samples.

    With a test set, the rule divides the training set, and test splits come from the test set. Without one, a
    stratified share of the whole set becomes the test set first. A rule that lists samples explicitly (a file, domains)
    is the exception: its indices count the whole set, and samples that no client trains on are test samples.

    Args:
        rule: The partition rule.
        labels: Class of each training sample, shape (N,); of each sample if there is no test set.
        test_labels: Class of each test sample, shape (M,), or None.
        validation_share: Share of each client's own samples that is held out for validation.
        test_share: Share of the whole set that is held out for tests if there is no test set.
        test_samples_per_client: Greatest size of a client's test split; None for the size of its training split.
        seed: Seed of the validation and test splits.
        domains: Domain of each sample, shape (N,), and the domains' names, if there are any.
        num_unlabeled: Number of unlabeled samples.
        novel: Ids of the clients that never train.

    Returns:
        The division.

    Raises:
        PartitionError: If the rule cannot be met, returns invalid indices, or a client gets no samples.

    Example:
        >>> from pfl_lightning.datamodules import IID
        >>> labels = np.repeat([0, 1], 40)
        >>> shares = dict(validation_share=0.1, test_share=0.25, test_samples_per_client=None)
        >>> division = divide(IID(num_clients=3), labels, None, **shares, seed=0)
        >>> [lists.sizes.tolist() for lists in (division.train, division.validation, division.test)]
        [[18, 18, 18], [2, 2, 2], [18, 18, 16]]
    """
    if domains is not None and test_labels is None:
        rule = rule.with_domains(*domains)
    if test_labels is None and not rule.fixed_train:
        pool, rest = _split_pool(labels, test_share, seed)
        own = [pool[part] for part in check_parts(rule, rule.partition(labels[pool]), len(pool))]
    else:
        own = check_parts(rule, rule.partition(labels), len(labels))
        rest = np.arange(len(labels), dtype=np.int64)
    _check_clients(own)
    validation = rule.fixed_validation()
    held = own if validation is None else [np.concatenate(both) for both in zip(own, validation, strict=True)]
    if test_labels is None and rule.fixed_train and not rule.fixed_test:
        rest = np.setdiff1d(rest, np.concatenate(held))
        if len(rest) == 0:
            raise PartitionError(
                "the file's training indices cover the whole data set and it has no test indices: add lists 'test'"
            )
    held_labels = [labels[part] for part in held]
    if test_labels is not None:
        test = rule.partition_test(test_labels, held_labels, test_samples_per_client)
    else:
        test = [rest[part] for part in rule.partition_test(labels[rest], held_labels, test_samples_per_client)]
        _check_apart(np.concatenate(held), np.concatenate(test))
    if validation is None:
        own, validation = split_validation(labels, own, validation_share, seed)
    # Of the clients' samples, not of the pool that the rule chose from, which a file of the same samples cannot tell.
    seen = np.unique(np.concatenate([*own, *validation])) if test_labels is None else None
    unlabeled = IndexLists(assign_unlabeled(rule, num_unlabeled, novel, seed))
    return Division(IndexLists(own), IndexLists(validation), IndexLists(test), seen, unlabeled)


def split_validation(labels: Ints, parts: Sequence[Ints], share: float, seed: int) -> tuple[list[Ints], list[Ints]]:
    """Training and validation samples of each client, by a stratified split of its own samples.

    Classes are rounded by largest remainders. Every class keeps a training sample, so that a client with few samples
    may get a smaller validation split, or none.

    Args:
        labels: Class of each sample, shape (N,).
        parts: Samples of each client.
        share: Share for validation, from 0 to below 1.
        seed: Seed of the choice; each client has its own stream.

    Returns:
        Training and validation samples of each client.

    Example:
        >>> labels = np.repeat([0, 1], 10)
        >>> train, validation = split_validation(labels, [np.arange(20)], share=0.2, seed=0)
        >>> labels[validation[0]].tolist(), len(train[0])
        ([0, 0, 1, 1], 16)
    """
    held = class_counts(labels, parts, int(labels.max()) + 1)
    totals = np.floor(held.sum(axis=1) * share + 0.5).astype(np.int64)
    counts = apportion(held * share, totals, np.zeros_like(held), np.maximum(held - 1, 0))
    train, validation = [], []
    for client, part in enumerate(parts):
        rng = np.random.default_rng([seed, DataStream.VALIDATION, client])
        chosen = take_per_class(labels[part], counts[client], rng)
        train.append(part[~chosen])
        validation.append(part[chosen])
    return train, validation


def check_batches(division: Division, batch_size: int) -> None:
    """Check that every client has at least one full batch, as ``drop_last`` needs.

    With unlabeled samples, a client that has some counts them too, and a client that has none is not checked: this
    function does not know whether the method uses them.

    Args:
        division: Indices of every client's splits.
        batch_size: Samples in a batch.

    Raises:
        PartitionError: If a client has fewer samples.
    """
    sizes, further = division.train.sizes + division.unlabeled.sizes, division.unlabeled.sizes
    training = further > 0 if further.any() else np.ones(len(sizes), dtype=bool)
    short = np.flatnonzero(training & (sizes < batch_size))
    if len(short):
        raise PartitionError(
            f"drop_last leaves client {short[0]} no batch ({len(short)} such clients): it has "
            f"{sizes[short[0]]} training samples, batch_size is {batch_size}; "
            f"lower batch_size to at most {sizes[training].min()}"
        )


def _split_pool(labels: Ints, test_share: float, seed: int) -> tuple[Ints, Ints]:
    held = np.bincount(labels)[None].astype(np.int64)
    total = np.floor(held.sum(axis=1) * test_share + 0.5).astype(np.int64)
    counts = apportion(held * test_share, total, np.zeros_like(held), np.maximum(held - 1, 0))
    chosen = take_per_class(labels, counts[0], np.random.default_rng([seed, DataStream.POOL]))
    if not chosen.any():
        raise PartitionError(
            f"test_share {test_share} of {len(labels)} samples leaves no test sample: raise test_share"
        )
    return np.flatnonzero(~chosen).astype(np.int64), np.flatnonzero(chosen).astype(np.int64)


def _check_clients(parts: Sequence[Ints]) -> None:
    empty = [client for client, part in enumerate(parts) if len(part) == 0]
    if empty:
        raise PartitionError(
            f"client(s) {empty[:10]} have no training samples ({len(empty)} of {len(parts)}): "
            "lower num_clients, or choose a rule with a minimum size"
        )


def _check_apart(held: Ints, test: Ints) -> None:
    shared = np.intersect1d(held, test)
    if len(shared):
        raise PartitionError(
            f"{len(shared)} samples are both in a training and in a test split (the first: {shared[0]}): "
            "without a separate test set, test indices must be of samples that no client trains on"
        )


def assign_unlabeled(rule: Partitioner, num_samples: int, novel: Sequence[int], seed: int) -> list[Ints]:
    """Indices of the unlabeled samples of each client: equal shares at random for the clients that train.

    A rule has no labels to use here, and clients that never train do not need the samples. A rule that lists unlabeled
    samples explicitly (a file) decides instead, except for the clients that never train.

    Args:
        rule: The partition rule.
        num_samples: Number of unlabeled samples.
        novel: Ids of the clients that never train.
        seed: Seed of the random order.

    Returns:
        One array of indices per client. Arrays are disjoint, cover all samples, and differ in size by one at most;
        empty for a novel client.

    Raises:
        PartitionError: If the rule lists an index outside the unlabeled samples.

    Example:
        >>> from pfl_lightning.datamodules import IID
        >>> indices = assign_unlabeled(IID(num_clients=3), num_samples=7, novel=[1], seed=0)
        >>> [len(own) for own in indices]
        [4, 0, 3]
    """
    shares = [np.empty(0, dtype=np.int64) for _ in range(rule.num_clients)]
    if num_samples == 0:
        return shares
    given = rule.fixed_unlabeled(num_samples)
    excluded = set(novel)
    training = [client for client in range(rule.num_clients) if client not in excluded]
    if given is None:
        order = np.random.default_rng([seed, DataStream.UNLABELED]).permutation(num_samples).astype(np.int64)
        given = [*shares]
        for client, share in zip(training, np.array_split(order, len(training)), strict=True):
            given[client] = share
    for client in training:
        shares[client] = given[client]
    return shares
