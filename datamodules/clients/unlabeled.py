"""Assignment of unlabeled samples to clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pfl_lightning.datamodules.counting import Ints
from pfl_lightning.datamodules.partition.base import Partitioner
from pfl_lightning.seeding import DataStream


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
