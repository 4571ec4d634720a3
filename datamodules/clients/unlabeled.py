"""Samples without labels: which client gets which."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.partition.base import UNLABELED_STREAM, Partitioner


def assign_unlabeled(rule: Partitioner, num_samples: int, novel: Sequence[int], seed: int) -> list[Ints]:
    """Deal samples without labels to the clients that train: in equal shares, at random.

    There are no labels that a rule could go by, and clients that never train have no use for them. Where the rule
    names such samples one by one (a file does), its lists are taken, but for the clients that never train.

    Args:
        rule: The partition rule.
        num_samples: Number of samples without labels.
        novel: The clients that never train.
        seed: Seed of the deal.

    Returns:
        One array of indices a client, disjoint and all together everything, of sizes that differ by one at most; empty
        for a novel client.

    Raises:
        PartitionError: If the rule names a sample that there is not.
    """
    shares = [np.empty(0, dtype=np.int64) for _ in range(rule.num_clients)]
    if num_samples == 0:
        return shares
    given = rule.fixed_unlabeled(num_samples)
    aside = set(novel)
    training = [client for client in range(rule.num_clients) if client not in aside]
    if given is None:
        order = np.random.default_rng([seed, UNLABELED_STREAM]).permutation(num_samples).astype(np.int64)
        given = [*shares]
        for client, share in zip(training, np.array_split(order, len(training)), strict=True):
            given[client] = share
    for client in training:
        shares[client] = given[client]
    return shares
