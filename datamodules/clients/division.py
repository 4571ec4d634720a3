"""From a partition rule to every client's training, validation and test indices."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.datamodules.clients.unlabeled import assign_unlabeled
from pfl_lightning.datamodules.counting import Ints, apportion, class_counts, take_per_class
from pfl_lightning.datamodules.partition.base import (
    POOL_STREAM,
    VALIDATION_STREAM,
    Partitioner,
    PartitionError,
)
from pfl_lightning.datamodules.partition.checks import check_parts


class IndexLists:
    """Many index lists in one tensor, so that thousands of clients cost no objects.

    Args:
        lists: One array of indices a client.
    """

    def __init__(self, lists: Sequence[Ints]) -> None:
        self.sizes = np.array([len(own) for own in lists], dtype=np.int64)
        self._ends = np.cumsum(self.sizes)
        self._flat = torch.from_numpy(np.concatenate([np.asarray(own, dtype=np.int64) for own in lists]))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, client: int) -> Tensor:
        """The indices of one client, shape (n,), int64: a view."""
        end = int(self._ends[client])
        return self._flat[end - int(self.sizes[client]) : end]

    def arrays(self) -> list[Ints]:
        """All lists as arrays."""
        return [self[client].numpy() for client in range(len(self))]

    def to_bytes(self) -> bytes:
        """The sizes of all lists, then their indices, the same on every machine."""
        return self.sizes.astype("<i8").tobytes() + self._flat.numpy().astype("<i8").tobytes()


@dataclass(frozen=True)
class Division:
    """Who holds which samples, in the data set's own order.

    Attributes:
        train: Training indices of each client.
        validation: Validation indices of each client, into the same samples.
        test: Test indices of each client, into the test set; into the same samples where there is no test set.
        held: All clients' training and validation samples, sorted, each once; None where the data set has a test set,
            so that every training sample may be looked at.
        unlabeled: Indices of each client into the samples without labels; none at all where there are no such samples.
    """

    train: IndexLists
    validation: IndexLists
    test: IndexLists
    held: Ints | None
    unlabeled: IndexLists

    def fingerprint(self, num_train: int, num_test: int, num_unlabeled: int, views: bytes = b"") -> str:
        """A hash of who holds what, in which order.

        Args:
            num_train: Number of training samples; of all samples where there is no test set.
            num_test: Number of test samples, 0 where there is no test set.
            num_unlabeled: Number of samples without labels.
            views: How clients see their samples, nothing where all see them as they are.

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
    """Give every client its training, validation and test samples.

    With a test set, the rule divides the training set, and test parts come from the test set. Without one, a
    stratified share of the whole set becomes the test set first; only where the rule names samples one by one (a
    file, domains) do its indices count the whole set, and what no client trains on serves for tests.

    Args:
        rule: The partition rule.
        labels: Class of each training sample, shape (N,); of each sample where there is no test set.
        test_labels: Class of each test sample, shape (M,), or None.
        validation_share: Share of each client's own samples that is set aside for validation.
        test_share: Share of the whole set that is set aside for tests where there is no test set.
        test_samples_per_client: Greatest size of a client's test part, None for the size of its training part.
        seed: Seed of both splits.
        domains: Domain of each sample, shape (N,), and the domains' names, if there are any.
        num_unlabeled: Number of samples without labels.
        novel: The clients that never train.

    Returns:
        The division.

    Raises:
        PartitionError: If the rule cannot be met, gives no valid indices, or a client gets no samples.
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
                "the file's training indices take up the whole set and it names no test indices: add 'test'"
            )
    held_labels = [labels[part] for part in held]
    if test_labels is not None:
        test = rule.partition_test(test_labels, held_labels, test_samples_per_client)
    else:
        test = [rest[part] for part in rule.partition_test(labels[rest], held_labels, test_samples_per_client)]
        _check_apart(np.concatenate(held), np.concatenate(test))
    if validation is None:
        own, validation = split_validation(labels, own, validation_share, seed)
    # Of the parts as they are, not of what the rule chose from, which a file of the same parts does not tell.
    seen = np.unique(np.concatenate([*own, *validation])) if test_labels is None else None
    unlabeled = IndexLists(assign_unlabeled(rule, num_unlabeled, novel, seed))
    return Division(IndexLists(own), IndexLists(validation), IndexLists(test), seen, unlabeled)


def split_validation(labels: Ints, parts: Sequence[Ints], share: float, seed: int) -> tuple[list[Ints], list[Ints]]:
    """Split a stratified share off each client's own samples.

    Classes are rounded by largest remainders. Every class keeps a training sample, so that a client of few samples may
    get a smaller validation part, or none.

    Args:
        labels: Class of each sample, shape (N,).
        parts: Samples of each client.
        share: Share for validation, from 0 to below 1.
        seed: Seed of the choice; each client has its own stream.

    Returns:
        Training and validation samples of each client.
    """
    held = class_counts(labels, parts, int(labels.max()) + 1)
    totals = np.floor(held.sum(axis=1) * share + 0.5).astype(np.int64)
    counts = apportion(held * share, totals, np.zeros_like(held), np.maximum(held - 1, 0))
    train, validation = [], []
    for client, part in enumerate(parts):
        rng = np.random.default_rng([seed, VALIDATION_STREAM, client])
        chosen = take_per_class(labels[part], counts[client], rng)
        train.append(part[~chosen])
        validation.append(part[chosen])
    return train, validation


def check_batches(division: Division, batch_size: int) -> None:
    """Check that every client fills a batch, for where smaller ones are left out.

    With samples without labels, a client that has some is taken to train on them, too, and one that has none not to
    train at all: whether a method takes them is not known here.

    Args:
        division: Who holds which samples.
        batch_size: Samples in a batch.

    Raises:
        PartitionError: If a client does not.
    """
    sizes, further = division.train.sizes + division.unlabeled.sizes, division.unlabeled.sizes
    training = further > 0 if further.any() else np.ones(len(sizes), dtype=bool)
    short = np.flatnonzero(training & (sizes < batch_size))
    if len(short):
        raise PartitionError(
            f"drop_last leaves client {short[0]} no batch ({len(short)} such clients): it has "
            f"{sizes[short[0]]} training samples, batch_size is {batch_size}; "
            f"lower batch_size to at most {sizes[training].min()} or set drop_last to false"
        )


def _split_pool(labels: Ints, test_share: float, seed: int) -> tuple[Ints, Ints]:
    held = np.bincount(labels)[None].astype(np.int64)
    total = np.floor(held.sum(axis=1) * test_share + 0.5).astype(np.int64)
    counts = apportion(held * test_share, total, np.zeros_like(held), np.maximum(held - 1, 0))
    chosen = take_per_class(labels, counts[0], np.random.default_rng([seed, POOL_STREAM]))
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
            f"{len(shared)} samples are both in a training and in a test part (the first: {shared[0]}): "
            "without a separate test set, test indices must name samples that no client trains on"
        )
